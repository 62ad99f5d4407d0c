import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.ratios import KL_ESTIMATORS, MAX_LOG_RATIO, importance_weights, reference_penalty

IS_ACTION = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], bool)  # all none holes last
RNG = np.random.default_rng(6)
POLICY = RNG.normal(-2.0, 0.5, IS_ACTION.shape)
REFERENCE = POLICY + RNG.normal(0.0, 0.4, IS_ACTION.shape)
BEHAVIOR = POLICY + RNG.normal(0.0, 0.3, IS_ACTION.shape)

# A policy over three tokens as logits, one to stay near to, and one that samples.
LOGITS = jnp.array([0.3, -0.4, 1.0])
NEAR = jax.nn.log_softmax(jnp.array([-0.5, 0.2, 0.4]))
SAMPLER = jax.nn.log_softmax(jnp.array([0.9, 0.1, -0.3]))


def loop_penalty(estimator, policy, reference, behavior, is_action):
    out = np.zeros(policy.shape)
    for at in zip(*np.nonzero(is_action), strict=True):
        d = reference[at] - policy[at]
        k = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]
        out[at] = math.exp(policy[at] - behavior[at]) * k
    return out


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_penalty_equals_a_loop(estimator):
    found = reference_penalty(POLICY, REFERENCE, BEHAVIOR, IS_ACTION, estimator=estimator)
    expected = loop_penalty(estimator, POLICY, REFERENCE, BEHAVIOR, IS_ACTION)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(found)[~IS_ACTION], 0.0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_penalty_gradient_equals_finite_differences(estimator):
    def total(x):
        return jnp.sum(reference_penalty(x, REFERENCE, BEHAVIOR, IS_ACTION, estimator=estimator))

    gradient = np.asarray(jax.grad(total)(jnp.asarray(POLICY, jnp.float32)))
    for at in np.ndindex(*IS_ACTION.shape):
        step = np.zeros(IS_ACTION.shape)
        step[at] = 1e-5
        up, down = (loop_penalty(estimator, POLICY + d, REFERENCE, BEHAVIOR, IS_ACTION).sum() for d in (step, -step))
        assert gradient[at] == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("sampler", [jax.nn.log_softmax(LOGITS), SAMPLER], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_mean_gradient_is_that_of_the_divergence_whoever_sampled(estimator, sampler):  # fault 17
    """Every token of the vocabulary, weighed by the probability with which the sampler draws it."""

    def expected(logits):
        policy = jax.nn.log_softmax(logits)
        each = reference_penalty(policy[None], NEAR[None], sampler[None], np.ones((1, 3), bool), estimator=estimator)
        return jnp.sum(jnp.exp(sampler) * each[0])

    def divergence(logits):
        policy = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(policy) * (policy - NEAR))

    gradient = jax.grad(divergence)(LOGITS)
    np.testing.assert_allclose(jax.grad(expected)(LOGITS), gradient, atol=1e-6)
    assert np.abs(gradient).max() > 0.05
    if estimator != "k2":
        assert float(expected(LOGITS)) == pytest.approx(float(divergence(LOGITS)), rel=1e-5)


def test_of_the_estimators_in_the_reward_k1_alone_pulls_as_the_divergence_does():
    """What `rl.kl_in=reward` leaves of each: E[k(x) grad log pi(x)], with the number a constant."""

    def pull(estimator, nearness):
        reference = jax.nn.log_softmax(LOGITS + nearness * (NEAR - jax.nn.log_softmax(LOGITS)))

        def surrogate(logits):
            policy = jax.nn.log_softmax(logits)
            each = KL_ESTIMATORS[estimator](policy[None], reference[None], np.ones((1, 3), bool))[0]
            weight = jax.lax.stop_gradient(jnp.exp(policy) * each)
            return jnp.sum(weight * policy)

        def divergence(logits):
            policy = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(policy) * (policy - reference))

        exact = jax.grad(divergence)(LOGITS)
        return float(jnp.vdot(jax.grad(surrogate)(LOGITS), exact) / jnp.vdot(exact, exact))

    assert pull("k1", 1.0) == pytest.approx(1, abs=1e-4) and pull("k1", 0.01) == pytest.approx(1, abs=1e-3)
    assert abs(pull("k2", 0.01)) < 0.05 and abs(pull("k3", 0.01)) < 0.05


def test_estimators_agree_near_equality_and_k1_alone_has_a_sign():
    d = np.array([[0.01, -0.01]])
    one = np.ones((1, 2), bool)
    k1, k2, k3 = (np.asarray(KL_ESTIMATORS[name](np.zeros((1, 2)), d, one)) for name in ("k1", "k2", "k3"))
    np.testing.assert_allclose(k1, -d, rtol=1e-6)
    np.testing.assert_allclose(k2, k3, rtol=1e-2)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_what_is_masked_leaks_into_neither_value_nor_gradient(estimator, poison):  # faults 6, 15 and 17
    def total(x, y, z):
        return jnp.sum(reference_penalty(x, y, z, IS_ACTION, estimator=estimator))

    clean = [jnp.asarray(x, jnp.float32) for x in (POLICY, REFERENCE, BEHAVIOR)]
    poisoned = [jnp.where(IS_ACTION, x, poison) for x in clean]
    value, gradient = jax.value_and_grad(total)(*poisoned)
    expected_value, expected_gradient = jax.value_and_grad(total)(*clean)
    assert float(value) == float(expected_value)
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[~IS_ACTION], 0.0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_reference_and_sampler_are_constants(estimator):
    def total(y, z):
        return jnp.sum(reference_penalty(POLICY, y, z, IS_ACTION, estimator=estimator))

    for gradient in jax.grad(total, argnums=(0, 1))(jnp.asarray(REFERENCE), jnp.asarray(BEHAVIOR)):
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("distance", [-100.0, 100.0])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_distant_policies_give_finite_penalties(estimator, distance):  # fault 18
    one = np.ones((1, 1), bool)
    for reference, behavior in ((distance, 0.0), (0.0, distance)):

        def total(x, reference=reference, behavior=behavior):
            return jnp.sum(
                reference_penalty(x, jnp.full((1, 1), reference), jnp.full((1, 1), behavior), one, estimator=estimator)
            )

        assert all(np.isfinite(x).all() for x in jax.value_and_grad(total)(jnp.zeros((1, 1))))


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_a_loop(level, cap):
    found = np.asarray(importance_weights(POLICY, BEHAVIOR, IS_ACTION, level=level, cap=cap))
    for n in range(4):
        logs = [POLICY[n, t] - BEHAVIOR[n, t] for t in range(4) if IS_ACTION[n, t]]
        for t in range(4):
            weight = math.exp(POLICY[n, t] - BEHAVIOR[n, t] if level == "token" else sum(logs))
            weight = weight if cap is None else min(weight, cap)
            assert found[n, t] == pytest.approx(weight if IS_ACTION[n, t] else 1.0, rel=1e-5)


def test_weights_are_one_for_equal_policies_and_stay_finite():
    for level in ("token", "sequence"):
        np.testing.assert_array_equal(importance_weights(POLICY, POLICY, IS_ACTION, level=level, cap=2.0), 1.0)
        far = importance_weights(POLICY + 50, POLICY, IS_ACTION, level=level, cap=None)
        assert float(np.max(far)) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
        poisoned = np.where(IS_ACTION, BEHAVIOR, np.nan)
        assert np.isfinite(importance_weights(POLICY, poisoned, IS_ACTION, level=level, cap=None)).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: reference_penalty(POLICY, REFERENCE, BEHAVIOR, IS_ACTION, estimator="k4"), "one of k1, k2, k3"),
        (lambda: importance_weights(POLICY, BEHAVIOR, IS_ACTION, level="turn", cap=2.0), "token or sequence"),
        (lambda: importance_weights(POLICY, BEHAVIOR, IS_ACTION, level="token", cap=0.5), "at least 1, got 0.5"),
    ],
)
def test_options_that_don_t_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
