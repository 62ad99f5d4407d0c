"""Importance ratios between two policies, per token, and the divergence estimated from them.

Every function masks its inputs first, so what stands at a position that is not an action (NaN, the log-probability of a
retrieved token) reaches neither the value nor the gradient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# exp(20) is 4.9e8: a ratio that large has no meaning left, but it and its sum over a million tokens are finite in
# float32, where exp overflows at 88.7. verl clamps at the same value.
MAX_LOG_RATIO = 20.0


def log_ratio(new: Float[Array, "B L"], old: Float[Array, "B L"], is_action: Bool[Array, "B L"]) -> Float[Array, "B L"]:
    """log(pi_new / pi_old) of the token that was taken, in float32; 0 where `is_action` is false. Not clamped.

    Args:
        new: log-probability of the token under the policy on top of the ratio.
        old: log-probability of the same token under the policy below.
        is_action: true where the policy chose the token.
    """
    new = jnp.where(is_action, jnp.asarray(new, jnp.float32), 0.0)
    old = jnp.where(is_action, jnp.asarray(old, jnp.float32), 0.0)
    return new - old


def new_over_old(
    new: Float[Array, "B L"], old: Float[Array, "B L"], is_action: Bool[Array, "B L"]
) -> Float[Array, "B L"]:
    """pi_new / pi_old of the token that was taken; 1 where `is_action` is false.

        ratio = exp(min(new - old, MAX_LOG_RATIO))

    Finite for any finite input. Above the clamp its gradient is 0; below, a log-ratio of -100 is an honest 0.
    """
    return jnp.exp(jnp.minimum(log_ratio(new, old, is_action), MAX_LOG_RATIO))


def k3(sampler: Float[Array, "B L"], other: Float[Array, "B L"], is_action: Bool[Array, "B L"]) -> Float[Array, "B L"]:
    """Estimate of KL(sampler || other) from each token that the sampler drew; 0 where `is_action` is false.

        d  = log(other / sampler)
        k3 = exp(d) - 1 - d

    Unbiased, never negative, and of low variance near d = 0. The exponential is clamped at `MAX_LOG_RATIO`, the linear
    term is not: a log-ratio of -100 gives 99.

    Args:
        sampler: log-probability under the policy that drew the tokens. With the roles exchanged the result estimates
            something else.
        other: log-probability of the same tokens under the policy compared with it.
        is_action: true where the policy chose the token.

    Source:
        Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
    """
    d = log_ratio(other, sampler, is_action)
    # expm1 keeps the digits that exp(d) - 1 loses at |d| < 1e-4, where an on-policy batch lies.
    return jnp.expm1(jnp.minimum(d, MAX_LOG_RATIO)) - d
