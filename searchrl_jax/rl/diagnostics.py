"""How far the policy in training has moved from the one that sampled, and how well values foretell returns."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from searchrl_jax.rl.aggregate import aggregate
from searchrl_jax.rl.ratios import k3, log_ratio, new_over_old

# Bins of the logarithm of a ratio, each around a multiple of the width: a ratio to 0.25 %, from 1/13 to 13. What lies
# beyond counts in the outermost bins.
BIN_WIDTH = 0.005
BINS_PER_SIDE = 512

Pair = tuple[Float[Array, ""], Float[Array, ""]]


class Diagnostics(NamedTuple):
    """Over the action tokens of a batch. A pair is (sum, denominator): add pairs up over micro-batches and devices,
    then divide once.

    ratio_mean: of pi_new / pi_old. On its own samples a policy's expectation of it is 1, whatever the distance.
    ratio_max: its maximum; combine by maximum. 0 if there is no action token.
    clipped_share: share of tokens whose ratio lies outside the bounds, whatever the sign of their advantage.
    approx_kl: k3 estimate of KL(old || current), in nats per token.
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
        behavior_logprob: what the sampler stored, or the log-probability under the proximal policy.
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


def ratio_counts(
    logprob: Float[Array, "B L"], behavior_logprob: Float[Array, "B L"], is_action: Bool[Array, "B L"]
) -> Float[Array, " bins"]:
    """Action tokens by the logarithm of their ratio: the histogram that `ratio_quantile` reads. Add it up over
    micro-batches and devices."""
    log_ratios = jax.lax.stop_gradient(log_ratio(logprob, behavior_logprob, is_action))
    index = jnp.clip(jnp.round(log_ratios / BIN_WIDTH), -BINS_PER_SIDE, BINS_PER_SIDE).astype(jnp.int32) + BINS_PER_SIDE
    return jnp.zeros(2 * BINS_PER_SIDE + 1).at[index].add(jnp.where(is_action, 1.0, 0.0))


def ratio_quantile(counts: Float[np.ndarray, " bins"], q: float) -> float:
    """The least ratio that a share `q` of the tokens doesn't exceed, to 0.25 %; 0 if there are no tokens.

    Args:
        counts: of `ratio_counts`, added up over the batch.
        q: in (0, 1].
    """
    below = np.cumsum(np.asarray(counts, np.float64))
    if below[-1] == 0:
        return 0.0
    return math.exp(BIN_WIDTH * (int(np.searchsorted(below, q * below[-1] - 1e-6)) - BINS_PER_SIDE))


def explained_variance(
    value: Float[np.ndarray, "N T"], target: Float[np.ndarray, "N T"], is_action: Bool[np.ndarray, "N T"]
) -> float:
    """Share of the variance of `target` that `value` explains, over the action tokens.

        1 - Var(target - value) / Var(target)

    1 for a perfect value model, 0 for a constant, below 0 for one that is worse than a constant. 0 where the targets
    have no variance.
    """
    target, error = target[is_action].astype(np.float64), (target - value)[is_action].astype(np.float64)
    if not len(target) or np.ptp(target) <= 1e-6 * np.abs(target).max():
        return 0.0
    return float(1 - error.var() / target.var())
