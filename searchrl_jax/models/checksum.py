"""A number that tells weights apart."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# Odd, so that no place in an array is multiplied away.
_STEPS = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


def checksum(params: Any) -> str:
    """Eight hexadecimal digits of all bits, shapes and dtypes of a tree of arrays, wherever they are placed.

        sum over arrays a and places p of  word(a[p]) * (1 + 2 * sum_d step_d p_d) * (2 a + 1),   modulo 2 ** 32

    It finds another checkpoint in the place of the one that a run began with. It is no protection against anybody.
    """
    arrays = jax.tree.leaves(params)
    sums = [int(_sum(array)) * (2 * place + 1) for place, array in enumerate(arrays)]
    shapes = "".join(f"{array.dtype}{array.shape}" for array in arrays).encode()
    return f"{(sum(sums) + int.from_bytes(shapes, 'big') % 4294967291) % 2**32:08x}"


@jax.jit
def _sum(array: Array) -> UInt32[Array, ""]:
    words = jax.lax.bitcast_convert_type(array, _WORDS[min(array.dtype.itemsize, 4)])  # 8 bytes become two words
    places = [
        jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(step)
        for axis, step in zip(range(words.ndim), _STEPS, strict=False)
    ]
    place = functools.reduce(operator.add, places, jnp.uint32(0))
    return jnp.sum(words.astype(jnp.uint32) * (jnp.uint32(1) + jnp.uint32(2) * place), dtype=jnp.uint32)
