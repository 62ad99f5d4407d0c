"""Importance ratios between two policies, per token, and the divergences estimated from them.

Every function masks its inputs first, so what stands at a position that is not an action (NaN, the log-probability of a
retrieved token) reaches neither the value nor the gradient.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
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


def k1(sampler: Float[Array, "B L"], other: Float[Array, "B L"], is_action: Bool[Array, "B L"]) -> Float[Array, "B L"]:
    """Estimate of KL(sampler || other) from each token that the sampler drew; 0 where `is_action` is false.

        k1 = -d,    d = log(other / sampler)

    Unbiased, of either sign, and of the highest variance of the three. Arguments and source as in `k3`.
    """
    return log_ratio(sampler, other, is_action)


def k2(sampler: Float[Array, "B L"], other: Float[Array, "B L"], is_action: Bool[Array, "B L"]) -> Float[Array, "B L"]:
    """Estimate of KL(sampler || other) from each token that the sampler drew; 0 where `is_action` is false.

        k2 = d^2 / 2,    d = log(other / sampler)

    Never negative and of low variance, but biased where the policies are far apart; its gradient isn't
    (`reference_penalty`). Arguments and source as in `k3`.
    """
    return log_ratio(other, sampler, is_action) ** 2 / 2


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


KL_ESTIMATORS: Mapping[str, Callable[[Array, Array, Array], Array]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})


def reference_penalty(
    logprob: Float[Array, "B L"],
    reference_logprob: Float[Array, "B L"],
    behavior_logprob: Float[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    estimator: str,
) -> Float[Array, "B L"]:
    """Loss term of each token whose mean has the gradient of KL(policy || reference), whoever sampled the token.

        ratio   = pi / pi_behavior
        k1, k3:   ratio * k(pi, reference)
        k2:       stop_gradient(ratio) * k2(pi, reference)

    Without the ratio the gradient of k1 would have mean 0 and that of k3 belong to another divergence; with it, for
    both, value and gradient are unbiased. k2 has the gradient of the KL as it stands, and the ratio serves to reweigh
    the tokens alone. 0 where `is_action` is false; no gradient flows into the other two policies.

    Args:
        logprob: log-probability of the token under the policy in training.
        reference_logprob: of the same token under the policy to stay near to.
        behavior_logprob: under the policy that drew it.
        is_action: true where a policy chose the token; false on prompt, tool output and padding.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: unknown `estimator`.

    Source:
        Tang and Munos 2025, arXiv:2506.09477, on the gradients of the estimators with and without the ratio.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    reference_logprob, behavior_logprob = jax.lax.stop_gradient((reference_logprob, behavior_logprob))
    ratio = new_over_old(logprob, behavior_logprob, is_action)
    if estimator == "k2":
        ratio = jax.lax.stop_gradient(ratio)
    return ratio * KL_ESTIMATORS[estimator](logprob, reference_logprob, is_action)


def importance_weights(
    learner_logprob: Float[Array, "N T"],
    behavior_logprob: Float[Array, "N T"],
    is_action: Bool[Array, "N T"],
    *,
    level: str,
    cap: float | None,
) -> Float[Array, "N T"]:
    """Weights that correct for a sampler whose probabilities differ from the learner's; 1 where `is_action` is false.

        token:     w_t = min(pi_learner / pi_behavior of token t, cap)
        sequence:  w_t = min(prod_s pi_learner / pi_behavior of tokens s, cap), one for the whole trajectory

    token is biased as soon as two tokens differ, and of low variance. sequence without a cap is unbiased, and its
    variance grows with the length of the trajectory: the cap is what makes it usable. Constants: to be computed before
    the loss.

    Args:
        learner_logprob: log-probability of the token under the learner at the start of the step.
        behavior_logprob: what the sampler stored.
        is_action: true where the policy chose the token. A row holds one whole trajectory.
        level: "token" or "sequence".
        cap: upper bound on a weight, at least 1; None for no bound but that of `new_over_old`.

    Raises:
        ValueError: unknown `level`, or a cap below 1.

    Source:
        Espeholt et al. 2018, arXiv:1802.01561 (truncated weights); Yao et al. 2025, "Your Efficient RL Framework
        Secretly Brings You Off-Policy RL Training" (for the mismatch of sampler and trainer).
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be token or sequence, got {level!r}")
    if cap is not None and not cap >= 1:
        raise ValueError(f"cap bounds the weight from above and must be at least 1, got {cap}; raise it")
    difference = log_ratio(learner_logprob, behavior_logprob, is_action)
    if level == "sequence":
        difference = jnp.where(is_action, jnp.sum(difference, axis=-1, keepdims=True), 0.0)
    weight = jnp.exp(jnp.minimum(difference, MAX_LOG_RATIO))
    return weight if cap is None else jnp.minimum(weight, cap)
