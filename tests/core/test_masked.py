import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.core.masked import masked_mean, masked_std, masked_sum

MASKS = {
    "all": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 0]],
    "last only": [[0, 0, 0, 1], [0, 0, 0, 1]],
}
X = np.array([[0.5, -1.25, 2.0, 0.75], [3.0, 0.1, -0.2, 1.5]])
WEIGHT = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 5.0, 1.0, 3.0]])


def loop_over_rows(mask, weight, ddof=1):
    """Sum, weighted mean and weighted deviation of each row, one number after the other."""
    sums, means, stds = [], [], []
    for row, keep, weights in zip(X, mask, weight, strict=True):
        kept = [(x, w) for x, k, w in zip(row, keep, weights, strict=True) if k]
        total = sum(w for _, w in kept)
        mean = sum(w * x for x, w in kept) / total if kept else 0.0
        sums.append(sum(x for x, _ in kept))
        means.append(mean)
        squares = sum(w * (x - mean) ** 2 for x, w in kept)
        stds.append((squares / (total - ddof)) ** 0.5 if total > ddof else 0.0)
    return np.array(sums), np.array(means), np.array(stds)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_equals_a_loop(mask, weight, ddof):
    where = np.array(mask, bool)
    sums, means, stds = loop_over_rows(where, np.ones_like(X) if weight is None else weight, ddof)
    np.testing.assert_allclose(masked_sum(X, where, 1), sums, rtol=1e-6)
    np.testing.assert_allclose(masked_mean(X, where, 1, weight=weight), means, rtol=1e-6)
    np.testing.assert_allclose(masked_std(X, where, 1, weight=weight, ddof=ddof), stds, rtol=1e-6)


def test_reduces_all_axes_by_default_and_keeps_them_when_asked():
    where = np.array(MASKS["holes"], bool)
    assert masked_sum(X, where).shape == ()
    assert float(masked_mean(X, where)) == pytest.approx(X[where].mean())
    assert float(masked_std(X, where)) == pytest.approx(X[where].std(ddof=1))
    assert masked_std(X, where, 1, keepdims=True).shape == (2, 1)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_std])
def test_what_is_masked_leaks_into_neither_value_nor_gradient(function, poison):
    where = np.array(MASKS["holes"], bool)
    poisoned = np.where(where, X, poison)
    value, gradient = jax.value_and_grad(lambda x: function(x, where))(jnp.asarray(poisoned, jnp.float32))
    clean, clean_gradient = jax.value_and_grad(lambda x: function(x, where))(jnp.asarray(X, jnp.float32))
    assert float(value) == float(clean)
    np.testing.assert_array_equal(gradient, clean_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[~where], 0.0)


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_std])
def test_nothing_to_reduce_is_zero_with_zero_gradient(function):
    value, gradient = jax.value_and_grad(lambda x: function(x, np.zeros(4, bool)))(jnp.full(4, jnp.nan))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


def test_deviation_of_equal_values_has_zero_gradient():
    value, gradient = jax.value_and_grad(lambda x: masked_std(x, np.ones(4, bool)))(jnp.full(4, 2.0))
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


def test_accumulates_in_float32():
    ones = jnp.ones(1000, jnp.bfloat16)  # bfloat16 cannot count beyond 256
    assert float(masked_sum(ones, jnp.ones(1000, bool))) == 1000.0
    assert masked_mean(ones, jnp.ones(1000, bool)).dtype == jnp.float32
