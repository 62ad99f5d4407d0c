"""Policy-gradient losses per token: `LOSSES[name](logprob, behavior_logprob, advantage, is_action, ...) -> [B, L]`.

All three take the same arguments, so that a configuration can name one, and agree in their gradient at ratio 1, where
it is -advantage * grad(logprob). They differ in what they do when the policy has moved away from the one that sampled:

    importance_sampling    nothing: unbiased, and unbounded
    ppo                    a token that has moved beyond a bound in the direction of its advantage loses its gradient
    cispo                  the weight is bounded and no token loses its gradient

With a proximal policy apart from the one that sampled (decoupled PPO, Hilton et al. 2021, arXiv:2110.00641), give its
log-probabilities in the place of `behavior_logprob`, and the advantage times the weight proximal / behaviour
(`ratios.importance_weights`): all three are homogeneous in the advantage, so that this weighs the loss.

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
    dual_clip: float | None = None,
) -> Float[Array, "B L"]:
    """PPO's clipped surrogate loss of each token.

        gain_t = min(ratio_t * advantage_t, clip(ratio_t, low, high) * advantage_t)
        loss_t = -gain_t,    with dual_clip and advantage_t < 0: -max(gain_t, dual_clip * advantage_t)

    The gradient is zero where ratio > high and advantage > 0, and where ratio < low and advantage < 0. Elsewhere it is
    that of `importance_sampling`; with a negative advantage the ratio is therefore not bounded above, unless by
    `dual_clip`: the gradient is zero beyond it, too.

    Args:
        logprob: log-probability of the token under the policy in training.
        behavior_logprob: what the sampler stored: of the very distribution it drew from, after temperature, top-p and
            top-k.
        advantage: per token; one number per row, [B], is copied to its tokens.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        clip_low_threshold: bound on the ratio itself, in [0, 1]: 0.8, where others write epsilon = 0.2.
        clip_high_threshold: likewise, at least 1.
        dual_clip: bound on the ratio of tokens with a negative advantage, above `clip_high_threshold`; 3 in its
            source. None for no bound.

    Raises:
        ValueError: the shapes don't fit, or the bounds don't satisfy 0 <= low <= 1 <= high < dual_clip.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7, with two bounds of their own; Ye et al. 2020, arXiv:1912.09729,
        eq. 4, for the dual clip.
    """
    _check_bounds(clip_low_threshold, clip_high_threshold)
    if dual_clip is not None and not dual_clip > clip_high_threshold:
        raise ValueError(
            f"dual_clip bounds ratios beyond clip_high_threshold={clip_high_threshold}, got {dual_clip}; raise it"
        )
    advantage = _token_advantage(advantage, is_action)
    ratio = new_over_old(logprob, jax.lax.stop_gradient(behavior_logprob), is_action)
    # Not jnp.clip, which halves the gradient at a bound: with a bound of 1 that is where every ratio begins.
    clipped = jnp.where(ratio < clip_low_threshold, clip_low_threshold, ratio)
    clipped = jnp.where(ratio > clip_high_threshold, clip_high_threshold, clipped)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is not None:
        gain = jnp.where(advantage < 0, jnp.maximum(gain, dual_clip * advantage), gain)
    return -gain


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

# The bounds that each function has if none are given.
DEFAULT_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"importance_sampling": (0.0, math.inf), "ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
)


def value_loss(
    value: Float[Array, "B L"],
    old_value: Float[Array, "B L"],
    target: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    clip: float | None,
) -> Float[Array, "B L"]:
    """Squared error of the value of each token, clipped as PPO clips its ratio; 0 where `is_action` is false.

        loss_t = max((v_t - target_t)^2, (old_t + clamp(v_t - old_t, -clip, clip) - target_t)^2) / 2

    A value that has moved further than `clip` towards its target within a step has no gradient; one that has moved
    away from it keeps it.

    Args:
        value: estimate *before* the token, of the value model in training.
        old_value: the estimate at the start of the step; constant.
        target: the return to be foretold, advantage + old_value; constant.
        is_action: true where the policy chose the token; false on prompt, tool output and padding.
        clip: in units of the reward, above 0; None for none.

    Raises:
        ValueError: a clip that is not positive.

    Source:
        Schulman et al., PPO in OpenAI Baselines (`ppo2`); not in the paper.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, in units of the reward, got {clip}; give None for no clipping")
    value, old_value, target = (
        jnp.where(is_action, jnp.asarray(x, jnp.float32), 0.0) for x in (value, old_value, target)
    )
    old_value, target = jax.lax.stop_gradient((old_value, target))
    error = (value - target) ** 2
    if clip is not None:
        error = jnp.maximum(error, (old_value + jnp.clip(value - old_value, -clip, clip) - target) ** 2)
    return error / 2


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
