import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.returns import gae, reward_to_go

MASKS = {
    "all": [1, 1, 1, 1, 1, 1],
    "none": [0, 0, 0, 0, 0, 0],
    "holes": [1, 1, 0, 0, 1, 1],
    "last only": [0, 0, 0, 0, 0, 1],
}
ALL_MASKS = np.array(list(MASKS.values()), bool)
RNG = np.random.default_rng(0)
REWARD = RNG.normal(size=ALL_MASKS.shape)
VALUE = RNG.normal(size=ALL_MASKS.shape)


def loop_gae(reward, value, is_action, discount, trace):
    """Over the list of action positions of each row: the definition on the subsequence."""
    out = np.zeros(reward.shape)
    for b in range(len(reward)):
        positions = [t for t in range(len(reward[b])) if is_action[b][t]]
        for i, t in enumerate(positions):
            for k in range(i, len(positions)):
                here, after = positions[k], positions[k + 1] if k + 1 < len(positions) else None
                delta = reward[b][here] - value[b][here] + (discount * value[b][after] if after is not None else 0.0)
                out[b][t] += (discount * trace) ** (k - i) * delta
    return out


def loop_reward_to_go(reward, is_action, discount):
    out = np.zeros(reward.shape)
    for b in range(len(reward)):
        positions = [t for t in range(len(reward[b])) if is_action[b][t]]
        for i, t in enumerate(positions):
            out[b][t] = sum(discount ** (k - i) * reward[b][positions[k]] for k in range(i, len(positions)))
    return out


@pytest.mark.parametrize("discount, trace", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.5)])
def test_gae_equals_a_loop(discount, trace):
    result = gae(REWARD, VALUE, ALL_MASKS, discount=discount, trace=trace)
    np.testing.assert_allclose(result, loop_gae(REWARD, VALUE, ALL_MASKS, discount, trace), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_reward_to_go_equals_a_loop(discount):
    result = reward_to_go(REWARD, ALL_MASKS, discount=discount)
    np.testing.assert_allclose(result, loop_reward_to_go(REWARD, ALL_MASKS, discount), rtol=1e-5, atol=1e-6)


def test_credit_crosses_tool_output():  # fault 11
    mask = np.array([MASKS["holes"]], bool)
    last = np.array([[0, 0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(reward_to_go(last, mask, discount=1.0), [[1, 1, 0, 0, 1, 1]])
    np.testing.assert_array_equal(gae(last, np.zeros((1, 6)), mask, discount=1.0, trace=1.0), [[1, 1, 0, 0, 1, 1]])


@pytest.mark.parametrize("poison", [9.0, -9.0, np.nan, np.inf])
def test_what_stands_on_tool_output_changes_nothing(poison):  # fault 11, the values 9 and -9
    clean = gae(REWARD, VALUE, ALL_MASKS, discount=0.9, trace=0.8)
    reward, value = np.where(ALL_MASKS, REWARD, poison), np.where(ALL_MASKS, VALUE, poison)
    np.testing.assert_array_equal(gae(reward, value, ALL_MASKS, discount=0.9, trace=0.8), clean)
    np.testing.assert_array_equal(
        reward_to_go(reward, ALL_MASKS, discount=0.9), reward_to_go(REWARD, ALL_MASKS, discount=0.9)
    )


def test_gae_without_decay_is_reward_to_go_minus_value():
    expected = np.where(ALL_MASKS, reward_to_go(REWARD, ALL_MASKS, discount=1.0) - VALUE, 0.0)
    np.testing.assert_allclose(gae(REWARD, VALUE, ALL_MASKS, discount=1.0, trace=1.0), expected, atol=1e-5)


def test_gae_with_trace_zero_is_the_one_step_error():
    mask = np.array([MASKS["holes"]], bool)
    reward, value = np.array([[0, 0, 7, 7, 0, 0.25]]), np.array([[0.5, 0.25, 9, -9, 0.75, 1.0]])
    expected = [[0.25 - 0.5, 0.75 - 0.25, 0, 0, 1.0 - 0.75, 0.25 - 1.0]]
    np.testing.assert_allclose(gae(reward, value, mask, discount=1.0, trace=0.0), expected)


def test_removing_the_tool_output_leaves_the_advantages():
    mask = np.array([MASKS["holes"]], bool)
    row = slice(2, 3)
    whole = gae(REWARD[row], VALUE[row], mask, discount=0.9, trace=0.8)
    squeezed = gae(
        REWARD[row][mask][None], VALUE[row][mask][None], np.ones((1, int(mask.sum())), bool), discount=0.9, trace=0.8
    )
    np.testing.assert_allclose(np.asarray(whole)[mask], np.asarray(squeezed)[0], rtol=1e-6)


def test_a_row_does_not_depend_on_the_others():
    alone = gae(REWARD[2:3], VALUE[2:3], ALL_MASKS[2:3], discount=0.9, trace=0.8)
    together = gae(REWARD, VALUE, ALL_MASKS, discount=0.9, trace=0.8)
    np.testing.assert_array_equal(alone[0], together[2])


def test_a_fractional_reward_survives_integer_input_does_too():
    mask = np.ones((1, 2), bool)
    np.testing.assert_allclose(
        reward_to_go(np.array([[0.0, 0.6309]]), mask, discount=1.0), [[0.6309, 0.6309]], rtol=1e-6
    )
    np.testing.assert_allclose(reward_to_go(np.array([[0, 1]]), mask, discount=0.5), [[0.5, 1.0]])


def test_gradient_of_gae_equals_finite_differences_and_is_zero_where_masked():
    mask = np.array([MASKS["holes"]], bool)
    weights = RNG.normal(size=(1, 6))

    def scalar(value):
        return jnp.sum(weights * gae(REWARD[2:3], value, mask, discount=0.9, trace=0.8))

    value = jnp.asarray(VALUE[2:3], jnp.float32)
    gradient = np.asarray(jax.grad(scalar)(value))
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    for t in range(6):
        step = np.zeros((1, 6))
        step[0, t] = 1e-2
        numeric = (
            np.sum(weights * loop_gae(REWARD[2:3], VALUE[2:3] + step, mask, 0.9, 0.8))
            - np.sum(weights * loop_gae(REWARD[2:3], VALUE[2:3] - step, mask, 0.9, 0.8))
        ) / 2e-2
        assert gradient[0, t] == pytest.approx(numeric, abs=1e-5)


@pytest.mark.parametrize("function", ["gae", "reward_to_go"])
def test_nan_on_tool_output_leaks_into_no_gradient(function):  # fault 15
    weights = RNG.normal(size=ALL_MASKS.shape)

    def scalar(x):
        if function == "gae":
            return jnp.sum(weights * gae(x, x, ALL_MASKS, discount=0.9, trace=0.8) ** 2)
        return jnp.sum(weights * reward_to_go(x, ALL_MASKS, discount=0.9) ** 2)

    gradient = jax.grad(scalar)(jnp.asarray(np.where(ALL_MASKS, VALUE, np.nan), jnp.float32))
    np.testing.assert_array_equal(gradient, jax.grad(scalar)(jnp.asarray(VALUE, jnp.float32)))
    np.testing.assert_array_equal(np.asarray(gradient)[~ALL_MASKS], 0.0)


# Recorded from rlax 0.1.9, which knows no tool output: here three tokens of it stand between the actions.
RLAX_REWARD, RLAX_VALUE = [0.03, 1.36, 1.22, -0.51, -0.3, -0.53], [0.57, -0.06, 0.75, -1.85, 1.57, -0.1]
RLAX_GAE = {
    (0.9, 0.8): [0.7125346, 1.8146315, -0.3894005, 1.1188881, -2.2695999, -0.43],
    (1.0, 1.0): [0.7, 1.3, -0.87, 0.51, -2.4, -0.43],
    (1.0, 0.5): [0.36718756, 1.934375, -0.47124995, 1.8175, -2.185, -0.43],
}
RLAX_RETURNS = [1.3606204, 1.4784671, 0.1316301, -1.2092999, -0.777, -0.53]  # discount 0.9
RLAX_ACTS = np.array([[1, 1, 0, 0, 1, 1, 0, 1, 1]], bool)


@pytest.mark.parametrize(("discount", "trace"), RLAX_GAE)
def test_gae_agrees_with_rlax(discount, trace):
    reward, value = np.full((2, 1, 9), np.nan)
    reward[RLAX_ACTS], value[RLAX_ACTS] = RLAX_REWARD, RLAX_VALUE
    found = gae(reward, value, RLAX_ACTS, discount=discount, trace=trace)
    np.testing.assert_allclose(np.asarray(found)[RLAX_ACTS], RLAX_GAE[discount, trace], atol=1e-6)


def test_reward_to_go_agrees_with_rlax():
    reward = np.full((1, 9), np.nan)
    reward[RLAX_ACTS] = RLAX_REWARD
    found = reward_to_go(reward, RLAX_ACTS, discount=0.9)
    np.testing.assert_allclose(np.asarray(found)[RLAX_ACTS], RLAX_RETURNS, atol=1e-6)
