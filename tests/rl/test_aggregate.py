import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.rl.aggregate import AGGREGATIONS, aggregate, divide

IS_ACTION = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], bool)  # all none holes last
PER_TOKEN = np.random.default_rng(2).normal(size=IS_ACTION.shape)
HOW = {"token_mean": {}, "sequence_mean": {}, "constant": {"normalizer": 32.0}}


def loop_mean(how, trajectories, normalizer=None):
    """Over a list of trajectories, each the list of the losses of its action tokens."""
    trajectories = [losses for losses in trajectories if losses]
    if not trajectories:
        return 0.0
    if how == "token_mean":
        return sum(map(sum, trajectories)) / sum(map(len, trajectories))
    if how == "sequence_mean":
        return sum(sum(losses) / len(losses) for losses in trajectories) / len(trajectories)
    return sum(map(sum, trajectories)) / (len(trajectories) * normalizer)


def test_every_way_is_tested_here():
    assert tuple(HOW) == AGGREGATIONS


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)])
@pytest.mark.parametrize("how", HOW)
def test_equals_a_loop(how, rows):
    trajectories = [list(x[keep]) for x, keep in zip(PER_TOKEN[rows], IS_ACTION[rows], strict=True)]
    result = divide(*aggregate(PER_TOKEN[rows], IS_ACTION[rows], how, **HOW[how]))
    assert float(result) == pytest.approx(loop_mean(how, trajectories, **HOW[how]), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("how", HOW)
def test_neither_packing_nor_splitting_nor_micro_batches_change_the_result(how):
    """Trajectories of 1, 2, 3 and 90 action tokens; the longest spans rows when split, and shares one when packed."""
    rng = np.random.default_rng(3)
    trajectories = [rng.normal(size=n) for n in (1, 90, 2, 3)]
    expected = loop_mean(how, [list(t) for t in trajectories], **HOW[how])
    losses = np.concatenate(trajectories)
    lengths = np.concatenate([np.full(len(t), len(t)) for t in trajectories])
    for width in (96, 32, 7):
        rows = -(-len(losses) // width)
        shape = (rows, width)

        def laid_out(x, size=rows * width, shape=shape):
            return np.pad(x, (0, size - len(x))).reshape(shape)

        table = laid_out(losses), laid_out(np.ones(len(losses), bool)), laid_out(lengths)
        parts = [
            aggregate(x[None], keep[None], how, trajectory_tokens=n[None], **HOW[how])
            for x, keep, n in zip(*table, strict=True)
        ]
        total, denominator = (sum(column) for column in zip(*parts, strict=True))
        assert float(divide(total, denominator)) == pytest.approx(expected, rel=1e-5)


def test_trajectories_weigh_the_same_however_many_rows_they_take():  # fault 5
    is_action = np.ones((6, 1), bool)  # episode A has one step, B five; one step a row
    tokens = np.array([[1], [5], [5], [5], [5], [5]])

    def weights(x):
        return divide(*aggregate(x, is_action, "sequence_mean", trajectory_tokens=tokens))

    per_token = np.asarray(jax.grad(weights)(jnp.ones((6, 1))))[:, 0]
    assert per_token[0] == pytest.approx(0.5) and per_token[1:].sum() == pytest.approx(0.5)


def test_length_weighs_as_stated():
    """Gradient per token of a trajectory of 1 and one of 3 tokens."""
    is_action = np.array([[1, 0, 0], [1, 1, 1]], bool)
    expected = {"token_mean": (1 / 4, 1 / 4), "sequence_mean": (1 / 2, 1 / 6), "constant": (1 / 64, 1 / 64)}
    for how, (short, long) in expected.items():
        gradient = jax.grad(lambda x, how=how: divide(*aggregate(x, is_action, how, **HOW[how])))(jnp.zeros((2, 3)))
        np.testing.assert_allclose(gradient, [[short, 0, 0], [long, long, long]], rtol=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("poison", [10.0, np.nan, np.inf])
def test_padding_is_in_neither_sum_nor_denominator(how, poison):  # fault 19
    is_action = np.array([[1, 1, 0, 0]], bool)

    def mean(x):
        return divide(*aggregate(x, is_action, how, **HOW[how]))

    padded = jnp.array([[1.0, 1.0, poison, poison]])
    assert float(mean(padded)) == float(mean(jnp.array([[1.0, 1.0, 0.0, 0.0]])))
    np.testing.assert_array_equal(np.asarray(jax.grad(mean)(padded))[0, 2:], 0.0)


@pytest.mark.parametrize("how", HOW)
def test_no_action_token_gives_zero_and_zero_gradient(how):
    def mean(x):
        total, denominator = aggregate(x, np.zeros((2, 3), bool), how, **HOW[how])
        return divide(total, denominator)

    value, gradient = jax.value_and_grad(mean)(jnp.full((2, 3), jnp.nan))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    assert [float(x) for x in aggregate(np.ones((2, 3)), np.zeros((2, 3), bool), how, **HOW[how])] == [0.0, 0.0]


def test_a_batch_twice_over_is_the_same_mean():
    for how, options in HOW.items():
        once = divide(*aggregate(PER_TOKEN, IS_ACTION, how, **options))
        twice = divide(*aggregate(np.tile(PER_TOKEN, (2, 1)), np.tile(IS_ACTION, (2, 1)), how, **options))
        assert float(twice) == pytest.approx(float(once), rel=1e-6)


@pytest.mark.parametrize(
    "how, normalizer, message",
    [
        ("mean", None, "token_mean, sequence_mean, constant"),
        ("constant", None, "normalizer belongs to"),
        ("token_mean", 32.0, "normalizer belongs to"),
        ("sequence_mean", 32.0, "normalizer belongs to"),
        ("constant", 0.0, "positive"),
    ],
)
def test_options_that_don_t_fit_are_refused(how, normalizer, message):
    with pytest.raises(ValueError, match=message):
        aggregate(PER_TOKEN, IS_ACTION, how, normalizer=normalizer)
