import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.losses import LOSSES
from searchrl_jax.rl.ratios import MAX_LOG_RATIO

IS_ACTION = np.array([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1]], bool)  # all none holes last
RNG = np.random.default_rng(1)
LOGPROB = RNG.normal(-2.0, 0.6, IS_ACTION.shape)
BEHAVIOR = LOGPROB + RNG.normal(0.0, 0.5, IS_ACTION.shape)
ADVANTAGE = RNG.normal(size=IS_ACTION.shape)
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def loop_loss(name, logprob, behavior, advantage, is_action, low, high):
    out = np.zeros(logprob.shape)
    for b in range(logprob.shape[0]):
        for t in range(logprob.shape[1]):
            if not is_action[b, t]:
                continue
            ratio, a = math.exp(logprob[b, t] - behavior[b, t]), advantage[b, t]
            clipped = min(max(ratio, low), high)
            out[b, t] = {
                "importance_sampling": -ratio * a,
                "ppo": -min(ratio * a, clipped * a),
                "cispo": -clipped * a * logprob[b, t],
            }[name]
    return out


def gradient_of(name, logprob=LOGPROB, behavior=BEHAVIOR, advantage=ADVANTAGE, is_action=IS_ACTION, **bounds):
    def total(x):
        return jnp.sum(LOSSES[name](x, behavior, advantage, is_action, **bounds))

    return np.asarray(jax.grad(total)(jnp.asarray(logprob, jnp.float32)))


def test_the_table_has_the_three_names():
    assert sorted(LOSSES) == ["cispo", "importance_sampling", "ppo"]


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (0.0, 4.0), (1.0, 6.0)])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_a_loop(name, low, high):
    result = LOSSES[name](LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION, clip_low_threshold=low, clip_high_threshold=high)
    assert result.shape == IS_ACTION.shape and result.dtype == jnp.float32
    expected = loop_loss(name, LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION, low, high)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(result)[~IS_ACTION], 0.0)


def test_default_bounds_are_those_of_the_sources():
    for name, low, high in [("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0), ("importance_sampling", 0.0, math.inf)]:
        behavior = LOGPROB + 2.0 * ADVANTAGE  # ratios from 0.05 to 40, beyond every bound
        expected = loop_loss(name, LOGPROB, behavior, ADVANTAGE, IS_ACTION, low, high)
        np.testing.assert_allclose(
            LOSSES[name](LOGPROB, behavior, ADVANTAGE, IS_ACTION), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    gradient = gradient_of(name, behavior=LOGPROB, **BOUNDS)
    np.testing.assert_allclose(gradient, np.where(IS_ACTION, -ADVANTAGE, 0.0), rtol=1e-6)


def test_cispo_is_importance_sampling_inside_the_bounds():
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    np.testing.assert_allclose(gradient_of("cispo", **wide), gradient_of("importance_sampling"), rtol=1e-5)


def test_ppo_drops_the_gradient_only_beyond_the_bound_on_its_advantage_s_side():
    ratio = np.array([[1.5, 1.5, 0.5, 0.5, 1.1]])
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    gradient = gradient_of("ppo", np.log(ratio), np.zeros((1, 5)), advantage, np.ones((1, 5), bool), **BOUNDS)
    np.testing.assert_allclose(gradient, [[0.0, 1.5, -0.5, 0.0, -1.1]], rtol=1e-5)


def test_cispo_keeps_every_gradient_with_the_bound_as_its_weight():
    ratio = np.array([[0.5, 1.1, 9.0]])
    one = np.ones((1, 3))
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 6.0}
    gradient = gradient_of("cispo", np.log(ratio), np.zeros((1, 3)), one, one > 0, **bounds)
    np.testing.assert_allclose(gradient, [[-0.8, -1.1, -6.0]], rtol=1e-5)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_gradient_equals_finite_differences(name):
    gradient = gradient_of(name, **BOUNDS)
    for b, t in np.ndindex(*IS_ACTION.shape):
        step = np.zeros(IS_ACTION.shape)
        step[b, t] = 1e-5
        up = loop_loss(name, LOGPROB + step, BEHAVIOR, ADVANTAGE, IS_ACTION, 0.8, 1.2).sum()
        down = loop_loss(name, LOGPROB - step, BEHAVIOR, ADVANTAGE, IS_ACTION, 0.8, 1.2).sum()
        assert gradient[b, t] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-5)


def test_cispo_gradient_is_not_that_of_its_value():
    """The weight is a constant: differentiating it, too, would add ratio * A * logp."""
    ratio = np.exp(LOGPROB - BEHAVIOR)
    expected = np.where(IS_ACTION, -np.clip(ratio, 0.8, 1.2) * ADVANTAGE, 0.0)
    np.testing.assert_allclose(gradient_of("cispo", **BOUNDS), expected, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_advantage_and_behavior_are_constants(name):
    def total(behavior, advantage):
        return jnp.sum(LOSSES[name](LOGPROB, behavior, advantage, IS_ACTION))

    both = jax.grad(total, argnums=(0, 1))(jnp.asarray(BEHAVIOR, jnp.float32), jnp.asarray(ADVANTAGE, jnp.float32))
    for gradient in both:
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e6])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_leaks_into_neither_value_nor_gradient(name, poison):  # faults 6 and 15
    poisoned = [np.where(IS_ACTION, x, poison) for x in (LOGPROB, BEHAVIOR, ADVANTAGE)]
    clean = LOSSES[name](LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION)
    np.testing.assert_array_equal(LOSSES[name](*poisoned, IS_ACTION), clean)
    gradient = gradient_of(name, *poisoned)
    np.testing.assert_array_equal(gradient, gradient_of(name))
    np.testing.assert_array_equal(gradient[~IS_ACTION], 0.0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("distance", [-100.0, 100.0])
def test_a_distant_policy_gives_finite_losses_and_gradients(name, distance):
    behavior = LOGPROB - distance
    assert np.isfinite(LOSSES[name](LOGPROB, behavior, ADVANTAGE, IS_ACTION)).all()
    assert np.isfinite(gradient_of(name, behavior=behavior)).all()


def test_the_ratio_stops_at_the_clamp():
    one = np.ones((1, 1))
    loss = LOSSES["importance_sampling"](100.0 * one, 0.0 * one, one, one > 0)
    assert float(loss[0, 0]) == pytest.approx(-math.exp(MAX_LOG_RATIO), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_one_advantage_per_row_is_copied_to_its_tokens(name):
    per_row = ADVANTAGE[:, 0]
    copied = np.repeat(per_row[:, None], IS_ACTION.shape[1], axis=1)
    np.testing.assert_array_equal(
        LOSSES[name](LOGPROB, BEHAVIOR, per_row, IS_ACTION), LOSSES[name](LOGPROB, BEHAVIOR, copied, IS_ACTION)
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(4, 1), (5,), (1, 5), ()])
def test_an_advantage_of_another_shape_is_refused(name, shape):
    with pytest.raises(ValueError, match="advantage must have shape"):
        LOSSES[name](LOGPROB, BEHAVIOR, np.ones(shape), IS_ACTION)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("low, high", [(0.2, 0.2), (-0.1, 1.2), (1.1, 1.2), (0.8, math.nan)])
def test_epsilons_in_place_of_bounds_are_refused(name, low, high):
    with pytest.raises(ValueError, match="bound the ratio itself"):
        LOSSES[name](LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION, clip_low_threshold=low, clip_high_threshold=high)


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_input_is_computed_in_float32(name):
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (LOGPROB, BEHAVIOR)]
    result = LOSSES[name](*rounded, ADVANTAGE, IS_ACTION)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, LOSSES[name](*(x.astype(jnp.float32) for x in rounded), ADVANTAGE, IS_ACTION))
