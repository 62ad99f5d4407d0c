import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.losses import DEFAULT_BOUNDS, LOSSES, ppo, value_loss
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


@pytest.mark.parametrize("low, high", [(0.8, 1.2), (1.0, 1.2), (0.8, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_whole_also_where_a_bound_is_1(name, low, high):
    bounds = {} if name == "importance_sampling" else {"clip_low_threshold": low, "clip_high_threshold": high}
    gradient = gradient_of(name, behavior=np.asarray(LOGPROB, np.float32), **bounds)
    np.testing.assert_allclose(gradient, np.where(IS_ACTION, -ADVANTAGE, 0), rtol=1e-5, atol=1e-6)


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
    assert {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "importance_sampling": (0.0, math.inf)} == DEFAULT_BOUNDS
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


# Dual clip.


def loop_dual_clip(logprob, behavior, advantage, is_action, low, high, dual):
    out = loop_loss("ppo", logprob, behavior, advantage, is_action, low, high)
    for at in zip(*np.nonzero(is_action), strict=True):
        if advantage[at] < 0:
            out[at] = min(out[at], -dual * advantage[at])
    return out


def test_dual_clip_equals_a_loop_and_its_gradient_finite_differences():
    far = LOGPROB - 2.0 * np.abs(BEHAVIOR - LOGPROB) - 0.5  # ratios from 1.6 up
    result = ppo(LOGPROB, far, ADVANTAGE, IS_ACTION, dual_clip=3.0)
    np.testing.assert_allclose(
        result, loop_dual_clip(LOGPROB, far, ADVANTAGE, IS_ACTION, 0.8, 1.2, 3.0), rtol=1e-5, atol=1e-6
    )
    gradient = gradient_of("ppo", behavior=far, dual_clip=3.0)
    for at in np.ndindex(*IS_ACTION.shape):
        step = np.zeros(IS_ACTION.shape)
        step[at] = 1e-5
        up, down = (loop_dual_clip(LOGPROB + d, far, ADVANTAGE, IS_ACTION, 0.8, 1.2, 3.0).sum() for d in (step, -step))
        assert gradient[at] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-5)


def test_dual_clip_bounds_the_ratio_of_negative_advantages_alone():
    ratio, advantage, one = np.array([[2.0, 5.0, 5.0, 0.5]]), np.array([[-1.0, -1.0, 1.0, -1.0]]), np.ones((1, 4), bool)
    loss = ppo(np.log(ratio), np.zeros((1, 4)), advantage, one, dual_clip=3.0)
    np.testing.assert_allclose(loss, [[2.0, 3.0, -1.2, 0.8]], rtol=1e-5)
    gradient = gradient_of("ppo", np.log(ratio), np.zeros((1, 4)), advantage, one, dual_clip=3.0)
    np.testing.assert_allclose(gradient, [[2.0, 0.0, 0.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize("dual", [1.2, 0.5, math.nan])
def test_a_dual_clip_below_the_upper_bound_is_refused(dual):
    with pytest.raises(ValueError, match="dual_clip bounds ratios beyond"):
        ppo(LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION, dual_clip=dual)


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_on_the_advantage_is_a_weight_on_the_loss(name):
    """Why the correction for the sampler may be multiplied into the advantage."""
    weight = np.abs(RNG.normal(size=IS_ACTION.shape))
    options = {"dual_clip": 3.0} if name == "ppo" else {}
    np.testing.assert_allclose(
        LOSSES[name](LOGPROB, BEHAVIOR, weight * ADVANTAGE, IS_ACTION, **options),
        weight * LOSSES[name](LOGPROB, BEHAVIOR, ADVANTAGE, IS_ACTION, **options),
        rtol=1e-5,
        atol=1e-6,
    )


# The value loss.

OLD_VALUE = np.zeros(IS_ACTION.shape) + 0.1
VALUE = OLD_VALUE + np.linspace(-0.5, 0.5, IS_ACTION.size).reshape(IS_ACTION.shape)
TARGET = np.where(np.arange(5) % 2, 0.9, -0.3) * np.ones(IS_ACTION.shape)


def loop_value_loss(value, clip):
    out = np.zeros(value.shape)
    for at in zip(*np.nonzero(IS_ACTION), strict=True):
        plain = (value[at] - TARGET[at]) ** 2
        if clip is not None:
            moved = min(max(value[at] - OLD_VALUE[at], -clip), clip)
            plain = max(plain, (OLD_VALUE[at] + moved - TARGET[at]) ** 2)
        out[at] = plain / 2
    return out


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_a_loop_and_its_gradient_finite_differences(clip):
    result = value_loss(VALUE, OLD_VALUE, TARGET, IS_ACTION, clip=clip)
    np.testing.assert_allclose(result, loop_value_loss(VALUE, clip), rtol=1e-5, atol=1e-7)

    def total(x):
        return jnp.sum(value_loss(x, OLD_VALUE, TARGET, IS_ACTION, clip=clip))

    gradient = np.asarray(jax.grad(total)(jnp.asarray(VALUE, jnp.float32)))
    for at in np.ndindex(*IS_ACTION.shape):
        step = np.zeros(IS_ACTION.shape)
        step[at] = 1e-5
        numeric = (loop_value_loss(VALUE + step, clip).sum() - loop_value_loss(VALUE - step, clip).sum()) / 2e-5
        assert gradient[at] == pytest.approx(numeric, rel=1e-4, abs=1e-5)
    np.testing.assert_array_equal(gradient[~IS_ACTION], 0.0)


def test_a_value_that_moved_far_enough_towards_its_target_has_no_gradient():
    def total(x):
        return jnp.sum(value_loss(x, jnp.zeros((1, 3)), jnp.ones((1, 3)), np.ones((1, 3), bool), clip=0.2))

    np.testing.assert_allclose(jax.grad(total)(jnp.array([[0.5, 0.1, -0.5]])), [[0.0, -0.9, -1.5]], rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_values_leak_nowhere(poison):  # fault 15
    poisoned = [np.where(IS_ACTION, x, poison) for x in (VALUE, OLD_VALUE, TARGET)]
    np.testing.assert_array_equal(
        value_loss(*poisoned, IS_ACTION, clip=0.2), value_loss(VALUE, OLD_VALUE, TARGET, IS_ACTION, clip=0.2)
    )
    gradient = jax.grad(lambda x: jnp.sum(value_loss(x, *poisoned[1:], IS_ACTION, clip=0.2)))(jnp.asarray(poisoned[0]))
    assert np.isfinite(gradient).all()


def test_a_value_clip_of_zero_is_refused():
    with pytest.raises(ValueError, match="clip must be positive"):
        value_loss(VALUE, OLD_VALUE, TARGET, IS_ACTION, clip=0.0)


def test_ppo_agrees_with_rlax():
    """Recorded from rlax 0.1.9, `clipped_surrogate_pg_loss(ratio, advantage, 0.2)`, value and gradient in log ratio."""
    ratio = np.array([[0.5, 0.79, 0.95, 1.0, 1.15, 1.5, 2.5, 0.6]])
    advantage, one = np.array([[1.0, -0.5, 0.3, -2.0, 1.5, 0.7, -0.4, -1.2]]), np.ones((1, 8), bool)
    recorded = [-0.0625, 0.0, -0.035625, 0.25, -0.215625, 0.0, 0.125, 0.0]
    loss = ppo(np.log(ratio), np.zeros((1, 8)), advantage, one)
    assert float(jnp.mean(loss)) == pytest.approx(0.12625, rel=1e-5)
    gradient = gradient_of("ppo", np.log(ratio), np.zeros((1, 8)), advantage, one)
    np.testing.assert_allclose(gradient[0] / 8, recorded, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_in_the_logits_agrees_with_rlax(name):
    """Recorded from rlax 0.1.9, `policy_gradient_loss(logits, [0, 3, 1], [1, -0.5, 2], ones)`."""
    logits = jnp.array([[-0.14, -0.38, 0.46, 0.82], [-0.2, -0.15, 0.69, -0.87], [-1.51, 0.39, -0.67, -1.92]])
    token, advantage, one = jnp.array([0, 3, 1]), np.array([[1.0, -0.5, 2.0]]), np.ones((1, 3), bool)
    recorded = [
        [-0.27974659, 0.04215283, 0.09764142, 0.13995233],
        [-0.03334595, -0.03505563, -0.08120169, 0.14960326],
        [0.06250443, -0.24876869, 0.1447832, 0.04148108],
    ]

    def chosen(x):
        return jnp.take_along_axis(jax.nn.log_softmax(x), token[:, None], axis=1).T

    gradient = jax.grad(lambda x: jnp.mean(LOSSES[name](chosen(x), chosen(logits), advantage, one)))(logits)
    np.testing.assert_allclose(gradient, recorded, atol=1e-6)
