"""Arrays filled one tensor at a time, each element straight onto the devices that it belongs to."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Index = tuple[int, ...]


def fill(
    shape: tuple[int, ...], dtype: np.dtype, pieces: Iterable[tuple[Index, np.ndarray]], sharding: NamedSharding | None
) -> Array:
    """The array whose element `index` is `piece`, for each pair of `pieces`; they cover it.

    Beside the array itself, one piece is held at a time: it is written into place, and the array that it's written
    into is donated.

    Args:
        sharding: where the array goes; the default device where None. Each process places its own shards.
    """
    whole = jnp.zeros(shape, dtype, device=sharding)
    write = jax.jit(_write, donate_argnums=0, out_shardings=sharding)
    for index, piece in pieces:
        # Without waiting, the next pieces would be read while this one is still held.
        whole = jax.block_until_ready(write(whole, _put(piece, sharding), index))
    return whole


def _put(piece: np.ndarray, sharding: NamedSharding | None) -> Array:
    if sharding is None:
        return jnp.asarray(piece)
    # `partition_spec` names every dimension; the piece has all but the first few, of layers and experts.
    spec = sharding.spec[len(sharding.spec) - piece.ndim :]
    own = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(piece.shape, own, lambda part: piece[part])


def _write(whole: Array, piece: Array, index: Index) -> Array:
    start = (*index, *(0,) * piece.ndim)
    return jax.lax.dynamic_update_slice(whole, piece[(None,) * len(index)], start)
