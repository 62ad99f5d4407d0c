"""Attention over blocks of keys, and the mask of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.ops.attention import KeyBlock, attend, attend_causally, causal_mask

B, T, S, N, K, H = 2, 5, 7, 4, 2, 6


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    k, v = rng.normal(size=(2, B, K, S, H)).astype(np.float32)
    mask = rng.random((B, T, S)) < 0.5
    mask[..., 0] = True
    return q, k, v, mask


def loop(q, k, v, mask):
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(*q.shape[:3]):
        head = n // (q.shape[2] // k.shape[1])
        readable = np.flatnonzero(mask[b, t])
        scores = np.array([np.dot(q[b, t, n], k[b, head, s]) / np.sqrt(q.shape[3]) for s in readable], float)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, head, readable]
    return out


def test_attend_is_the_loop(arrays):
    np.testing.assert_allclose(attend(arrays[0], [KeyBlock(*arrays[1:])]), loop(*arrays), atol=1e-5)


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 6)])
def test_split_blocks_equal_one(arrays, cuts):
    q, k, v, mask = arrays
    edges = (0, *cuts, S)
    blocks = [KeyBlock(k[:, :, a:b], v[:, :, a:b], mask[:, :, a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    np.testing.assert_allclose(attend(q, blocks), attend(q, [KeyBlock(k, v, mask)]), atol=1e-6)


def test_a_block_that_nobody_may_read_changes_nothing(arrays):
    q, k, v, mask = arrays
    shut = KeyBlock(np.full_like(k, 1e6), np.full_like(v, 1e6), np.zeros((1, 1, S), bool))
    np.testing.assert_array_equal(attend(q, [shut, KeyBlock(k, v, mask)]), attend(q, [KeyBlock(k, v, mask)]))


def test_masked_keys_change_nothing_and_get_no_gradient(arrays):
    q, k, v, mask = arrays
    mask = np.broadcast_to(np.array([1, 1, 0, 1, 0, 1, 0], bool), mask.shape)
    poisoned_k, poisoned_v = k.copy(), v.copy()
    poisoned_k[:, :, ~mask[0, 0]] = np.nan
    poisoned_v[:, :, ~mask[0, 0]] = 1e6
    want = attend(q, [KeyBlock(k, v, mask)])
    np.testing.assert_array_equal(attend(q, [KeyBlock(poisoned_k, poisoned_v, mask)]), want)
    grads = jax.grad(lambda k, v: jnp.sum(jnp.sin(attend(q, [KeyBlock(k, v, mask)]))), argnums=(0, 1))(k, v)
    for grad in grads:
        assert not np.any(np.asarray(grad)[:, :, ~mask[0, 0]])
        assert np.all(np.any(np.asarray(grad)[:, :, mask[0, 0]], axis=-1))


def test_gradients_equal_finite_differences(arrays):
    q, k, v, mask = arrays

    def f(q, k, v):
        left, right = (
            KeyBlock(k[:, :, :3], v[:, :, :3], mask[..., :3]),
            KeyBlock(k[:, :, 3:], v[:, :, 3:], mask[..., 3:]),
        )
        return jnp.sum(jnp.sin(attend(q, [left, right])))

    direction = [np.random.default_rng(1).normal(size=x.shape).astype(np.float32) for x in (q, k, v)]
    grads = jax.grad(f, argnums=(0, 1, 2))(q, k, v)
    slope = sum(float(np.sum(g * d)) for g, d in zip(grads, direction, strict=True))
    step = 1e-2
    ahead, behind = (f(*(x + sign * step * d for x, d in zip((q, k, v), direction, strict=True))) for sign in (1, -1))
    assert slope == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-2)


def test_causal_mask_is_the_drawing():
    drawn = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(causal_mask(jnp.array([[1, 1, 2, 2, 0]])), np.array([drawn], bool))


@pytest.mark.parametrize("chunk", [1, 3, 7, 128])
def test_attend_causally_equals_the_full_mask_for_any_chunk(chunk):
    rng = np.random.default_rng(2)
    q = rng.normal(size=(B, 7, N, H)).astype(np.float32)
    k, v = rng.normal(size=(2, B, K, 7, H)).astype(np.float32)
    segment_ids = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]])
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & np.tri(7, dtype=bool)
    got = attend_causally(q, k, v, segment_ids, chunk=chunk)
    np.testing.assert_allclose(got, loop(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize(("chunk", "window"), [(2, 1), (3, 2), (7, 3), (2, 7)])
def test_a_window_shuts_out_what_is_further_back(chunk, window):
    rng = np.random.default_rng(2)
    q = rng.normal(size=(B, 7, N, H)).astype(np.float32)
    k, v = rng.normal(size=(2, B, K, 7, H)).astype(np.float32)
    segment_ids = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]])
    mask = (
        (segment_ids[:, :, None] == segment_ids[:, None, :]) & np.tri(7, dtype=bool) & ~np.tri(7, k=-window, dtype=bool)
    )
    got = attend_causally(q, k, v, segment_ids, chunk=chunk, window=window)
    np.testing.assert_allclose(got, loop(q, k, v, mask), atol=1e-5)


def test_a_sink_is_a_key_that_everyone_reads_and_whose_value_is_nothing(arrays):
    q, k, v, mask = arrays
    sink = np.array([-30.0, 0.5, 2.0, 60.0], np.float32)
    got = attend(q, [KeyBlock(k, v, mask)], sink=sink, scale=0.3)
    for b, t, n in np.ndindex(B, T, N):
        readable = np.flatnonzero(mask[b, t])
        scores = np.array([0.3 * np.dot(q[b, t, n], k[b, n // 2, s]) for s in readable] + [sink[n]], float)
        weights = np.exp(scores - scores.max())
        want = (weights / weights.sum())[:-1] @ v[b, n // 2, readable]
        np.testing.assert_allclose(got[b, t, n], want, atol=1e-5)


def test_the_output_has_the_dtype_of_the_query(arrays):
    q, k, v, mask = arrays
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = attend(low[0], [KeyBlock(*low[1:], mask)])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), loop(q, k, v, mask), atol=0.05)
