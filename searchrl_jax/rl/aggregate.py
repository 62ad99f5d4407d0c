"""From a loss per token to (sum, denominator).

Micro-batches, devices and packed rows add both parts up, and the one division comes last, in `divide`; a mean of means
would weigh a token by the company it happens to be packed with. A trajectory may span rows and a row may hold several,
so what depends on a trajectory's length takes it as an argument.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.core.masked import masked_sum

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def aggregate(
    per_token: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    how: str,
    *,
    trajectory_tokens: Int[Array, "B L"] | None = None,
    normalizer: float | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum and denominator of a per-token quantity over the action tokens.

    With n_i the number of action tokens of trajectory i, N the number of trajectories, x the quantity:

        how              divide(sum, denominator)
        token_mean       sum_i sum_t x_it / sum_i n_i
        sequence_mean    sum_i (sum_t x_it / n_i) / N
        constant         sum_i sum_t x_it / (N * normalizer)

    Consequences. token_mean: every token counts alike, so a trajectory counts by its length and long ones dominate the
    batch. sequence_mean: every trajectory counts alike, so a token counts less in a long one; long failures are
    punished less per token, which lengthens them. constant: the gradient of the expected return itself, without a bias
    by length; the size of the step grows with the mean length.

    Over parts of a batch the sums add up to those of the whole: part of a trajectory counts in N as its share of the
    action tokens.

    Args:
        per_token: what to average; not read where `is_action` is false.
        is_action: the tokens that count. A trajectory none of whose tokens is an action counts nowhere, not in N
            either.
        how: one of `AGGREGATIONS`.
        trajectory_tokens: at each action token, the number of action tokens of its *whole* trajectory, in all of its
            rows. If None, each row is taken for one whole trajectory. Not read by "token_mean".
        normalizer: for "constant" only: tokens per trajectory, the same throughout the run; the token budget of a
            trajectory, say. With 1 the result is the mean over trajectories of their sums.

    Returns:
        Sum and denominator, float32 scalars. Both are 0 if there is no action token: skip such a batch and count it.

    Raises:
        ValueError: unknown `how`; a `normalizer` that is missing for "constant", not positive, or given for another.

    Source:
        token_mean: DAPO, arXiv:2503.14476. sequence_mean: GRPO, arXiv:2402.03300, eq. 3. constant: Dr. GRPO,
        arXiv:2503.20783, and AsyncWebRL, arXiv:2606.05597, on multi-turn trajectories.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"how must be one of {', '.join(AGGREGATIONS)}, got {how!r}")
    if (how == "constant") == (normalizer is None):
        raise ValueError(
            f"normalizer belongs to how='constant' and to it alone, got how={how!r} and normalizer={normalizer}"
        )
    if normalizer is not None and normalizer <= 0:
        raise ValueError(f"normalizer must be a positive number of tokens, got {normalizer}")

    is_action = jnp.asarray(is_action)
    if how == "token_mean":
        return masked_sum(per_token, is_action), masked_sum(jnp.ones(is_action.shape), is_action)

    if trajectory_tokens is None:
        trajectory_tokens = jnp.sum(is_action, axis=-1, keepdims=True)
    share = jnp.where(is_action, 1.0 / jnp.maximum(trajectory_tokens, 1), 0.0)  # of its trajectory, per token
    if normalizer is None:
        return jnp.sum(jnp.where(is_action, per_token, 0.0) * share), jnp.sum(share)
    return masked_sum(per_token, is_action), normalizer * jnp.sum(share)


def divide(total: Float[Array, ""], denominator: Float[Array, ""]) -> Float[Array, ""]:
    """total / denominator after everything was summed; 0 (with gradient 0) where the denominator is 0."""
    is_empty = denominator <= 0
    return jnp.where(is_empty, 0.0, total) / jnp.where(is_empty, 1.0, denominator)
