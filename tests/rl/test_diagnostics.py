import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.aggregate import divide
from searchrl_jax.rl.diagnostics import diagnostics, explained_variance, ratio_counts, ratio_quantile
from searchrl_jax.rl.ratios import MAX_LOG_RATIO, k3, log_ratio, new_over_old

IS_ACTION = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], bool)  # all none holes last
RNG = np.random.default_rng(4)
LOGPROB = RNG.normal(-2.0, 0.5, IS_ACTION.shape)
BEHAVIOR = LOGPROB + RNG.normal(0.0, 0.4, IS_ACTION.shape)
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)])
def test_equals_a_loop(rows):
    ratios, clipped, kls = [], 0, []
    for new, old, keep in zip(LOGPROB[rows].flat, BEHAVIOR[rows].flat, IS_ACTION[rows].flat, strict=True):
        if keep:
            ratio = math.exp(new - old)
            ratios.append(ratio)
            clipped += ratio < 0.8 or ratio > 1.2
            kls.append(ratio - 1 - (new - old))
    result = diagnostics(LOGPROB[rows], BEHAVIOR[rows], IS_ACTION[rows], **BOUNDS)
    count = len(ratios)
    for pair, total in (
        (result.ratio_mean, sum(ratios)),
        (result.clipped_share, clipped),
        (result.approx_kl, sum(kls)),
    ):
        assert float(pair[0]) == pytest.approx(total, rel=1e-4, abs=1e-6)
        assert float(pair[1]) == count
    assert float(result.ratio_max) == pytest.approx(max(ratios, default=0.0), rel=1e-5)


def test_on_policy():
    result = diagnostics(LOGPROB, LOGPROB, IS_ACTION, **BOUNDS)
    assert float(divide(*result.ratio_mean)) == 1.0 and float(result.ratio_max) == 1.0
    assert float(divide(*result.clipped_share)) == 0.0 and float(divide(*result.approx_kl)) == 0.0


def test_pairs_add_up_over_micro_batches():
    whole = diagnostics(LOGPROB, BEHAVIOR, IS_ACTION, **BOUNDS)
    parts = [diagnostics(LOGPROB[i : i + 1], BEHAVIOR[i : i + 1], IS_ACTION[i : i + 1], **BOUNDS) for i in range(4)]
    for name in ("ratio_mean", "clipped_share", "approx_kl"):
        for position in (0, 1):
            total = sum(float(getattr(part, name)[position]) for part in parts)
            assert total == pytest.approx(float(getattr(whole, name)[position]), rel=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e6])
def test_what_is_masked_leaks_nowhere(poison):  # faults 6 and 15
    poisoned = [np.where(IS_ACTION, x, poison) for x in (LOGPROB, BEHAVIOR)]
    clean = jax.tree.leaves(diagnostics(LOGPROB, BEHAVIOR, IS_ACTION, **BOUNDS))
    for a, b in zip(jax.tree.leaves(diagnostics(*poisoned, IS_ACTION, **BOUNDS)), clean, strict=True):
        assert float(a) == float(b)
    for function in (log_ratio, new_over_old, k3):
        gradient = jax.grad(lambda x, f=function: jnp.sum(f(x, poisoned[1], IS_ACTION)))(
            jnp.asarray(poisoned[0], jnp.float32)
        )
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.asarray(gradient)[~IS_ACTION], 0.0)


def test_a_reference_s_opinion_of_retrieved_tokens_is_not_in_the_divergence():  # fault 6
    is_action = np.array([[1, 1, 0, 0, 1]], bool)
    policy, reference = np.full((1, 5), -1.0), np.full((1, 5), -1.5)
    changed = reference.copy()
    changed[0, 2] = -30.0
    np.testing.assert_array_equal(k3(policy, reference, is_action), k3(policy, changed, is_action))
    gradient = jax.grad(lambda x: jnp.sum(k3(policy, x, is_action)))(jnp.asarray(changed, jnp.float32))
    assert float(gradient[0, 2]) == 0.0 and float(gradient[0, 1]) != 0.0


def test_k3_of_a_distant_policy_is_finite():  # fault 18
    one = np.ones((1, 1), bool)
    zero = jnp.zeros((1, 1))
    assert float(k3(zero, zero - 100.0, one)[0, 0]) == pytest.approx(99.0)
    assert float(k3(zero - 100.0, zero, one)[0, 0]) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    for distance in (-100.0, 100.0):
        assert np.isfinite(jax.grad(lambda x: jnp.sum(k3(x, zero, one)))(zero + distance)).all()
        assert all(np.isfinite(x) for x in jax.tree.leaves(diagnostics(zero + distance, zero, one, **BOUNDS)))


def test_k3_is_unbiased_and_never_negative():
    policy, other = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimates = np.asarray(k3(np.log(policy)[None], np.log(other)[None], np.ones((1, 3), bool)))[0]
    assert (estimates >= 0).all()
    assert policy @ estimates == pytest.approx(policy @ np.log(policy / other), rel=1e-5)


def test_k3_keeps_its_digits_near_zero():
    d = np.array([[1e-4]])
    assert float(k3(np.zeros((1, 1)), d, np.ones((1, 1), bool))[0, 0]) == pytest.approx(5e-9, rel=2e-3)


def test_k3_gradient_equals_finite_differences():
    one = np.ones((1, 1), bool)
    zero = np.zeros((1, 1))
    for d in (-1.0, 0.3, 2.0):
        gradient = float(jax.grad(lambda x: jnp.sum(k3(zero, x, one)))(jnp.full((1, 1), d))[0, 0])
        numeric = ((math.exp(d + 1e-5) - (d + 1e-5)) - (math.exp(d - 1e-5) - (d - 1e-5))) / 2e-5
        assert gradient == pytest.approx(numeric, rel=1e-4)


def test_no_gradient_flows_through_diagnostics():
    def total(logprob):
        return sum(jax.tree.leaves(diagnostics(logprob, BEHAVIOR, IS_ACTION, **BOUNDS)))

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(LOGPROB, jnp.float32)), 0.0)


def test_quantiles_of_the_ratio_to_a_quarter_percent_whatever_the_split():
    ratios = np.exp(np.random.default_rng(7).normal(0, 0.2, (4, 100)))
    keep = np.random.default_rng(8).random((4, 100)) < 0.7
    logprob = np.where(keep, np.log(ratios), np.nan)
    parts = [ratio_counts(logprob[i : i + 1], np.zeros((1, 100)), keep[i : i + 1]) for i in range(4)]
    counts = np.sum(parts, axis=0)
    assert counts.sum() == keep.sum()
    for q in (0.5, 0.99, 1.0):
        expected = np.quantile(ratios[keep], q, method="inverted_cdf")
        assert ratio_quantile(counts, q) == pytest.approx(expected, rel=0.003)
    assert ratio_quantile(np.zeros_like(counts), 0.99) == 0


def test_on_policy_every_quantile_is_one_and_far_ratios_stop_at_the_last_bin():
    assert ratio_quantile(ratio_counts(LOGPROB, LOGPROB + 1e-4, IS_ACTION), 0.99) == 1
    assert ratio_quantile(ratio_counts(LOGPROB + 9, LOGPROB, IS_ACTION), 0.99) == pytest.approx(math.exp(2.56))


def test_explained_variance_by_hand():
    acts = np.array([[1, 1, 0], [1, 0, 1]], bool)
    target = np.array([[1.0, 0.0, 99.0], [0.5, 99.0, -1.0]])
    assert explained_variance(target, target, acts) == 1
    assert explained_variance(np.zeros((2, 3)), target, acts) == pytest.approx(0)
    assert explained_variance(np.full((2, 3), 7.0), target, acts) == pytest.approx(0)
    assert explained_variance(-target, target, acts) == pytest.approx(-3)
    assert explained_variance(target / 2, target, acts) == pytest.approx(0.75)
    assert explained_variance(target, np.full((2, 3), 0.3), acts) == 0
    assert explained_variance(target, target, np.zeros((2, 3), bool)) == 0
