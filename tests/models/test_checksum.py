"""The checksum of weights: what it tells apart, and what it doesn't."""

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.models.checksum import checksum


def test_every_bit_place_shape_and_dtype_counts():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    tree = {"a": x, "b": {"c": x[0, 0]}}
    first = checksum(tree)
    assert len(first) == 8 and checksum(jax.tree.map(jnp.asarray, tree)) == first
    least = x.copy()
    least.view(np.uint32)[2, 3, 4] ^= 1
    others = [
        {"a": least, "b": {"c": x[0, 0]}},
        {"a": x[::-1], "b": {"c": x[0, 0]}},
        {"a": x[:, ::-1], "b": {"c": x[0, 0]}},
        {"a": x.transpose(0, 2, 1), "b": {"c": x[0, 0]}},
        {"a": x.reshape(12, 5), "b": {"c": x[0, 0]}},
        {"a": x, "b": {"c": x[0, 0][::-1]}},
        {"a": jnp.asarray(x, jnp.bfloat16), "b": {"c": x[0, 0]}},
        {"a": x.view(np.int32), "b": {"c": x[0, 0]}},
    ]
    assert len({first, *map(checksum, others)}) == 1 + len(others)
