"""Norm, rotary embedding, convolution and products against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.ops.convolution import causal_convolution, convolution_state
from searchrl_jax.ops.linear import project
from searchrl_jax.ops.norm import rms_norm
from searchrl_jax.ops.rope import Yarn, rotary_tables, rotate


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_rms_norm_is_the_formula(rng):
    x, scale = rng.normal(size=(3, 5, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    got = rms_norm(x, scale, epsilon=1e-3)
    for b in range(3):
        for t in range(5):
            mean_square = sum(float(value) ** 2 for value in x[b, t]) / 8
            np.testing.assert_allclose(got[b, t], scale * x[b, t] / np.sqrt(mean_square + 1e-3), rtol=2e-6)


def test_rms_norm_keeps_the_dtype_and_sums_in_float32():
    # In bfloat16 the squares of 1000 ones-and-a-bit would sum to 256 and stay there.
    x = jnp.full((1, 4096), 1.5, jnp.bfloat16)
    got = rms_norm(x, jnp.ones(4096), epsilon=1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), 1.0, rtol=1e-2)


def test_rotate_turns_each_pair_by_its_angle(rng):
    positions = np.array([[0, 1, 2, 300], [7, 8, 9, 10]])
    x = rng.normal(size=(2, 4, 3, 6)).astype(np.float32)
    got = rotate(x, *rotary_tables(positions, 6, 100.0))
    for b, t, n, i in np.ndindex(2, 4, 3, 3):
        turned = (x[b, t, n, i] + 1j * x[b, t, n, i + 3]) * np.exp(1j * positions[b, t] * 100.0 ** (-2 * i / 6))
        np.testing.assert_allclose(got[b, t, n, i], turned.real, atol=2e-5)
        np.testing.assert_allclose(got[b, t, n, i + 3], turned.imag, atol=2e-5)


def test_tables_of_few_dimensions_leave_the_rest_of_a_head_alone(rng):
    x = rng.normal(size=(1, 2, 3, 10)).astype(np.float32)
    tables = rotary_tables(np.array([[3, 50]]), 4, 100.0)
    got = rotate(x, *tables)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[..., :4], rotate(x[..., :4], *tables))


def test_pairs_outside_the_turning_share_stand_still():
    cosine, sine = rotary_tables(np.array([[3, 50]]), 10, 100.0, turning=0.5)
    full = rotary_tables(np.array([[3, 50]]), 10, 100.0)
    np.testing.assert_array_equal(cosine[..., :2], full[0][..., :2])
    np.testing.assert_array_equal(cosine[..., 2:], np.ones((1, 2, 3)))
    np.testing.assert_array_equal(sine[..., 2:], np.zeros((1, 2, 3)))


def test_a_yarn_factor_below_one_leaves_the_length_as_it_is():
    yarn = Yarn(factor=0.5, original_length=64, fast=4.0, slow=1.0)
    cosine, sine = rotary_tables(np.array([[3]]), 32, 1e4, yarn=yarn)
    np.testing.assert_allclose(cosine**2 + sine**2, 1.0, rtol=1e-5)


def test_yarn_stretches_slow_pairs_by_its_factor_and_fast_ones_not_at_all():
    yarn = Yarn(factor=8.0, original_length=64, fast=4.0, slow=1.0)
    cosine, sine = rotary_tables(np.array([[1]]), 32, 1e4, yarn=yarn)
    angle = np.arctan2(sine, cosine)[0, 0]
    plain = 1e4 ** (-np.arange(16) / 16)
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(angle[turns >= 4], plain[turns >= 4], rtol=1e-5)
    np.testing.assert_allclose(angle[turns <= 1], plain[turns <= 1] / 8, rtol=1e-5)
    between = (turns > 1) & (turns < 4)
    assert between.any() and np.all(angle[between] < plain[between]) and np.all(angle[between] > plain[between] / 8)
    np.testing.assert_allclose(np.hypot(cosine, sine), 0.1 * np.log(8) + 1, rtol=1e-6)


def test_rotated_products_depend_on_distance_alone(rng):
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(at_q, at_k):
        turned_q = rotate(q, *rotary_tables(np.array([[at_q]]), 8, 1e4))
        return float(jnp.sum(turned_q * rotate(k, *rotary_tables(np.array([[at_k]]), 8, 1e4))))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 6), abs=1e-2)


def test_positions_past_256_stay_apart_in_bfloat16():
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = rotate(x, *rotary_tables(jnp.array([[256, 257]]), 8, 1e4))
    assert turned.dtype == jnp.bfloat16
    assert not np.array_equal(turned[0, 0], turned[0, 1])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("segments", [None, [[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 3, 3, 3, 3, 3, 0]]])
def test_convolution_is_the_loop(rng, width, segments):
    x = rng.normal(size=(2, 8, 3)).astype(np.float32)
    kernel = rng.normal(size=(width, 3)).astype(np.float32)
    past = rng.normal(size=(2, width - 1, 3)).astype(np.float32)
    ids = None if segments is None else np.array(segments)
    expected = np.zeros_like(x)
    for b, t, j in np.ndindex(2, 8, width):
        if t - j >= 0:
            if ids is None or ids[b, t - j] == ids[b, t]:
                expected[b, t] += kernel[j] * x[b, t - j]
        elif ids is None:
            expected[b, t] += kernel[j] * past[b, width - 1 + t - j]
    np.testing.assert_allclose(causal_convolution(x, kernel, past, ids), expected, atol=1e-6)


def test_convolution_goes_on_from_its_state(rng):
    x = rng.normal(size=(2, 9, 3)).astype(np.float32)
    kernel = rng.normal(size=(4, 3)).astype(np.float32)
    whole = causal_convolution(x, kernel, jnp.zeros((2, 3, 3)))
    # Row 0 takes 2 tokens first, row 1 takes 5; what follows them in the first piece is padding.
    first = np.full((2, 5, 3), 1e6, np.float32)
    first[0, :2], first[1] = x[0, :2], x[1, :5]
    state = convolution_state(first, jnp.zeros((2, 3, 3)), jnp.array([2, 5]))
    np.testing.assert_array_equal(state[0], [np.zeros(3), x[0, 0], x[0, 1]])
    np.testing.assert_array_equal(state[1], x[1, 2:5])
    rest = causal_convolution(np.stack([x[0, 2:6], x[1, 5:9]]), kernel, state)
    np.testing.assert_allclose(rest, [whole[0, 2:6], whole[1, 5:9]], atol=1e-6)
    none_new = convolution_state(first, state, jnp.array([0, 0]))
    np.testing.assert_array_equal(none_new, state)


def test_project_is_the_einsum_and_so_is_its_gradient(rng):
    x, w = rng.normal(size=(2, 3, 4)).astype(np.float32), rng.normal(size=(4, 5, 6)).astype(np.float32)
    np.testing.assert_allclose(project(x, w), np.einsum("BTD,DNH->BTNH", x, w), atol=1e-5)
    got = jax.grad(lambda x, w: jnp.sum(jnp.sin(project(x, w))), argnums=(0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(jnp.einsum("BTD,DNH->BTNH", x, w))), argnums=(0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
