"""Policy-gradient losses per token: `LOSSES[name](logprob, behavior_logprob, advantage, is_action, ...) -> [B, L]`.

All three take the same arguments, so that a configuration can name one, and agree in their gradient at ratio 1, where
it is -advantage * grad(logprob). They differ in what they do when the policy has moved away from the one that sampled:

    importance_sampling    nothing: unbiased, and unbounded
    ppo                    a token that has moved beyond a bound in the direction of its advantage loses its gradient
    cispo                  the weight is bounded and no token loses its gradient

`advantage` and `behavior_logprob` are constants: no gradient flows into either. Values where `is_action` is false are
exactly 0, and so is the gradient there, whatever stands there. Turn the result into a number with `aggregate`.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from searchrl_jax.rl.ratios import new_over_old


def importance_sampling(
    logprob: Float[Array, "B L"],
    behavior_logprob: Float[Array, "B L"],
    advantage: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = math.inf,
) -> Float[Array, "B L"]:
    """Importance-weighted policy-gradient loss of each token.

        loss_t = -ratio_t * advantage_t,    ratio_t = exp(logprob_t - behavior_logprob_t)

    Args:
        logprob: log-probability of the token under the policy in training.
        behavior_logprob: what the sampler stored: of the very distribution it drew from, after temperature, top-p and
            top-k.
        advantage: per token; one number per row, [B], is copied to its tokens.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        clip_low_threshold: checked but not used: this loss has no bounds.
        clip_high_threshold: likewise.

    Raises:
        ValueError: the shapes don't fit, or the bounds don't satisfy 0 <= low <= 1 <= high.

    Source:
        Degris et al. 2012, arXiv:1205.4839 (off-policy actor-critic), with Tinker's name and signs.
    """
    _check_bounds(clip_low_threshold, clip_high_threshold)
    advantage = _token_advantage(advantage, is_action)
    return -new_over_old(logprob, jax.lax.stop_gradient(behavior_logprob), is_action) * advantage


def ppo(
    logprob: Float[Array, "B L"],
    behavior_logprob: Float[Array, "B L"],
    advantage: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Float[Array, "B L"]:
    """PPO's clipped surrogate loss of each token.

        loss_t = -min(ratio_t * advantage_t, clip(ratio_t, low, high) * advantage_t)

    The gradient is zero where ratio > high and advantage > 0, and where ratio < low and advantage < 0. Elsewhere it is
    that of `importance_sampling`; with a negative advantage the ratio is therefore not bounded above.

    Args:
        logprob: log-probability of the token under the policy in training.
        behavior_logprob: what the sampler stored: of the very distribution it drew from, after temperature, top-p and
            top-k.
        advantage: per token; one number per row, [B], is copied to its tokens.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        clip_low_threshold: bound on the ratio itself, in [0, 1]: 0.8, where others write epsilon = 0.2.
        clip_high_threshold: likewise, at least 1.

    Raises:
        ValueError: the shapes don't fit, or the bounds don't satisfy 0 <= low <= 1 <= high.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7, with two bounds of their own.
    """
    _check_bounds(clip_low_threshold, clip_high_threshold)
    advantage = _token_advantage(advantage, is_action)
    ratio = new_over_old(logprob, jax.lax.stop_gradient(behavior_logprob), is_action)
    clipped = jnp.clip(ratio, clip_low_threshold, clip_high_threshold)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def cispo(
    logprob: Float[Array, "B L"],
    behavior_logprob: Float[Array, "B L"],
    advantage: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> Float[Array, "B L"]:
    """Policy-gradient loss of each token with a clipped importance weight.

        loss_t = -stop_gradient(clip(ratio_t, low, high)) * advantage_t * logprob_t

    Inside the bounds its gradient is that of `importance_sampling`; outside it goes on with the bound as its weight.
    Its *value* is not a surrogate objective and not comparable with that of the other losses.

    The lower bound is 0 by default. A positive one lifts the weight of a token that the policy has already moved away
    from, so an off-policy batch pushes it down again as hard as at first, and the distance to the sampler grows without
    a brake; the published service recommends 1.0 and 6.0, a floor under every weight, and both can be set here.

    Args:
        logprob: log-probability of the token under the policy in training.
        behavior_logprob: what the sampler stored: of the very distribution it drew from, after temperature, top-p and
            top-k.
        advantage: per token; one number per row, [B], is copied to its tokens.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        clip_low_threshold: lower bound on the weight, in [0, 1].
        clip_high_threshold: upper bound on the weight, at least 1.

    Raises:
        ValueError: the shapes don't fit, or the bounds don't satisfy 0 <= low <= 1 <= high.

    Source:
        MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5; bounds 0 and 4 as ScaleRL 2025, arXiv:2510.13786, found enough.
    """
    _check_bounds(clip_low_threshold, clip_high_threshold)
    advantage = _token_advantage(advantage, is_action)
    ratio = new_over_old(logprob, behavior_logprob, is_action)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, clip_low_threshold, clip_high_threshold))
    return -weight * advantage * jnp.where(is_action, jnp.asarray(logprob, jnp.float32), 0.0)


LOSSES: Mapping[str, Callable[..., Float[Array, "B L"]]] = MappingProxyType(
    {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo}
)


def _token_advantage(advantage: Array, is_action: Array) -> Array:
    """The advantage of each token as a constant, zero where `is_action` is false."""
    advantage = jnp.asarray(advantage, jnp.float32)
    rows, tokens = jnp.shape(is_action)
    if advantage.shape not in ((rows, tokens), (rows,)):
        raise ValueError(
            f"advantage must have shape {(rows, tokens)} or {(rows,)}, got {advantage.shape}; spread it with to_tokens"
        )
    if advantage.ndim == 1:
        advantage = advantage[:, None]
    return jax.lax.stop_gradient(jnp.where(is_action, advantage, 0.0))


def _check_bounds(low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(
            "the clip thresholds bound the ratio itself, 0 <= low <= 1 <= high (0.8 and 1.2, not 0.2), "
            f"got low={low} and high={high}"
        )
