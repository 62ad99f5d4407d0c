"""How far the policy in training has moved from the one that sampled."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl_jax.rl.aggregate import aggregate
from searchrl_jax.rl.ratios import k3, new_over_old

Pair = tuple[Float[Array, ""], Float[Array, ""]]


class Diagnostics(NamedTuple):
    """Over the action tokens of a batch. A pair is (sum, denominator): add pairs up over micro-batches and devices,
    then divide once.

    ratio_mean: of pi_new / pi_old. On its own samples a policy's expectation of it is 1, whatever the distance.
    ratio_max: its maximum; combine by maximum. 0 if there is no action token.
    clipped_share: share of tokens whose ratio lies outside the bounds, whatever the sign of their advantage.
    approx_kl: k3 estimate of KL(behaviour || current), in nats per token.
    """

    ratio_mean: Pair
    ratio_max: Float[Array, ""]
    clipped_share: Pair
    approx_kl: Pair


def diagnostics(
    logprob: Float[Array, "B L"],
    behavior_logprob: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Diagnostics:
    """Ratio, clipping and divergence over the action tokens. No gradient flows through any of them.

    Args:
        logprob: log-probability of the token under the policy in training.
        behavior_logprob: what the sampler stored.
        is_action: true where the policy chose the token.
        clip_low_threshold: lower bound on the ratio itself; a ratio equal to it is not clipped.
        clip_high_threshold: upper bound, likewise.
    """
    logprob, behavior_logprob = jax.lax.stop_gradient((logprob, behavior_logprob))
    ratio = new_over_old(logprob, behavior_logprob, is_action)
    is_clipped = (ratio < clip_low_threshold) | (ratio > clip_high_threshold)
    return Diagnostics(
        ratio_mean=aggregate(ratio, is_action, "token_mean"),
        ratio_max=jnp.max(jnp.where(is_action, ratio, 0.0), initial=0.0),
        clipped_share=aggregate(is_clipped, is_action, "token_mean"),
        approx_kl=aggregate(k3(behavior_logprob, logprob, is_action), is_action, "token_mean"),
    )
