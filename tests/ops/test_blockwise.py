"""Attention in blocks equals attention at once, its gradients too, and its memory grows with the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.ops.attention import KeyBlock, attend, causal_mask
from searchrl_jax.ops.blockwise import attend_in_blocks

B, T, N, K, H = 2, 37, 4, 2, 6
SEGMENTS = np.array([[1] * 20 + [2] * 11 + [0] * 6, [1] * 3 + [2] * 30 + [3] * 4], np.int32)


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, N, H))
    k, v = rng.normal(size=(2, B, K, T, H))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(rng.normal(size=N), jnp.float32)


def at_once(q, k, v, *, window, scale, sink):
    return attend(q, [KeyBlock(k, v, causal_mask(SEGMENTS, window))], scale=scale, sink=sink)


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("block", [1, 8, 37, 64])
def test_blocks_equal_one_look_with_all_gradients(block, window, has_sink):
    (q, k, v), sink = arrays()
    options = {"window": window, "scale": 0.3}

    def in_blocks(q, k, v, sink):
        sink = sink if has_sink else None
        return attend_in_blocks(q, k, v, SEGMENTS, block=block, sink=sink, **options)

    def whole(q, k, v, sink):
        return at_once(q, k, v, sink=sink if has_sink else None, **options)

    got, pull = jax.vjp(in_blocks, q, k, v, sink)
    want, pull_whole = jax.vjp(whole, q, k, v, sink)
    np.testing.assert_allclose(got, want, atol=2e-6)
    grad = jnp.asarray(np.random.default_rng(1).normal(size=got.shape), jnp.float32)
    for name, one, other in zip(["q", "k", "v", "sink"], pull(grad), pull_whole(grad), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
    if has_sink:
        assert np.abs(pull(grad)[3]).max() > 1e-2


def test_half_precision_loses_no_more_than_one_look_does():
    (q, k, v), _ = arrays(jnp.bfloat16)
    (exact_q, exact_k, exact_v), _ = arrays()
    options = {"window": None, "scale": None, "sink": None}
    exact = at_once(exact_q, exact_k, exact_v, **options)
    got = attend_in_blocks(q, k, v, SEGMENTS, block=8)
    assert got.dtype == jnp.bfloat16
    error, error_at_once = (np.abs(x.astype(jnp.float32) - exact).max() for x in (got, at_once(q, k, v, **options)))
    assert error < 1.5 * error_at_once


def test_memory_grows_with_the_length_alone():
    def temporary(length):
        shapes = [(1, length, 2, 8), (1, 2, length, 8), (1, 2, length, 8)]
        x = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

        def f(q, k, v, segment_ids):
            return jnp.sum(attend_in_blocks(q, k, v, segment_ids, block=64))

        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(jax.grad(f, argnums=(0, 1, 2))).lower(*x, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 2.5 * temporary(4096)
