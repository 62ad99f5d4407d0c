"""Returns and advantages along one trajectory, token by token, across the tool output between its actions.

A row looks like this, and only the action tokens exist for the recursions below; prompt, tool output and padding are
stepped over:

    token      p  p  a  a  o  o  a  a  .
    is_action  0  0  1  1  0  0  1  1  0

Multiplying a running return by the mask would instead cut every trajectory at its first tool call.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def reward_to_go(reward: Float[Array, "B L"], is_action: Bool[Array, "B L"], *, discount: float) -> Float[Array, "B L"]:
    """Discounted sum of the rewards from each action token to the last.

    For consecutive action tokens t < t' (tool output between them is skipped)

        R_t = r_t + discount * R_t'

    with R = 0 after the last action. A row holds one trajectory.

    Args:
        reward: reward received on emitting token t; what stands where `is_action` is false is not read.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        discount: in [0, 1], per action token (per turn, if the columns are turns).

    Returns:
        Returns, zero where `is_action` is false.

    Source:
        Sutton and Barto, Reinforcement Learning, 2nd edition, eq. 3.9, on the subsequence of action tokens.
    """
    reward = jnp.where(is_action, jnp.asarray(reward, jnp.float32), 0.0)

    start = (jnp.zeros(reward.shape[0], jnp.float32), jnp.asarray(discount, jnp.float32))
    _, returns_LB = jax.lax.scan(_return_step, start, (reward.T, jnp.asarray(is_action).T), reverse=True)
    return returns_LB.T


# Not a closure over `discount`: advantages are computed outside jit, where a scan over a new closure compiles at each
# call (70 ms against 0.5).
def _return_step(after: tuple[Array, Array], column: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
    next_return, discount = after
    r, acts = column
    return_here = jnp.where(acts, r + discount * next_return, next_return)
    return (return_here, discount), jnp.where(acts, return_here, 0.0)


def gae(
    reward: Float[Array, "B L"],
    value: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    discount: float,
    trace: float,
) -> Float[Array, "B L"]:
    """Generalised advantage estimates, bootstrapping across tool output.

    For consecutive action tokens t < t' (tool output between them is skipped)

        delta_t = r_t + discount * V_t' - V_t
        A_t     = delta_t + discount * trace * A_t'

    with V = A = 0 after the last action. A row holds one trajectory. `A + value` is the target of the value model.

    Args:
        reward: reward received on emitting token t; float, so that a fractional nDCG survives.
        value: critic estimate *before* token t is emitted; what stands where `is_action` is false is not read.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        discount: in [0, 1], per action token, not per turn.
        trace: the lambda of the paper, in [0, 1].

    Returns:
        Advantages, zero where `is_action` is false. Not normalised, and not cut off from the gradient of `value`: the
        losses do that.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16, on the subsequence of action tokens.
    """
    reward = jnp.where(is_action, jnp.asarray(reward, jnp.float32), 0.0)
    value = jnp.where(is_action, jnp.asarray(value, jnp.float32), 0.0)

    def step(after: tuple[Array, Array], column: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_advantage = after
        r, v, acts = column
        advantage = r + discount * next_value - v + discount * trace * next_advantage
        here = (jnp.where(acts, v, next_value), jnp.where(acts, advantage, next_advantage))
        return here, jnp.where(acts, advantage, 0.0)

    nothing = jnp.zeros(reward.shape[0], jnp.float32)
    _, advantages_LB = jax.lax.scan(
        step, (nothing, nothing), (reward.T, value.T, jnp.asarray(is_action).T), reverse=True
    )
    return advantages_LB.T
