"""What a decoder remembers of each row: keys, values and convolution inputs."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from searchrl_jax.models.config import DecoderConfig


@struct.dataclass
class Cache:
    """The state of B rows; row b holds `length[b]` tokens.

    `k` and `v` are [layers, B, K, S, H], `conv` is [layers, B, W - 1, D] (W - 1 = 0 without a convolution).
    Entries at or past `length[b]` are garbage that no query reads.
    """

    k: Float[Array, "Y B K S H"]
    v: Float[Array, "Y B K S H"]
    conv: Float[Array, "Y B W-1 D"]
    length: Int[Array, " B"]


def init_cache(config: DecoderConfig, rows: int, capacity: int, dtype: jnp.dtype = jnp.float32) -> Cache:
    """An empty cache of `rows` rows of `capacity` tokens."""
    shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
    conv = (config.num_layers, rows, max(config.conv_width - 1, 0), config.model_dim)
    return Cache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        conv=jnp.zeros(conv, dtype),
        length=jnp.zeros(rows, jnp.int32),
    )


@struct.dataclass
class Entries:
    """What T new tokens per row add: keys and values [layers, B, K, T, H], and the convolution state after them."""

    k: Float[Array, "Y B K T H"]
    v: Float[Array, "Y B K T H"]
    conv: Float[Array, "Y B W-1 D"]


def rows_of(cache: Cache, slots: Int[Array, " R"], bucket: int) -> Cache:
    """The first `bucket` entries of the rows `slots`, as a cache of their own."""
    return Cache(
        k=cache.k[:, slots, :, :bucket],
        v=cache.v[:, slots, :, :bucket],
        conv=cache.conv[:, slots],
        length=cache.length[slots],
    )


def write_rows(cache: Cache, entries: Entries, num_new: Int[Array, " R"], slots: Int[Array, " R"]) -> Cache:
    """The cache after row `slots[r]` took the first `num_new[r]` tokens of `entries`; none where `num_new[r]` is 0.

    What stands past `num_new[r]` is written too, past the row's new length, where nobody reads it. The caller leaves
    room for it: length + T <= S, or `dynamic_update_slice` would move the write back over valid entries.
    """

    def write(r: Int[Array, ""], cache: Cache) -> Cache:
        slot, is_real = slots[r], num_new[r] > 0
        start = cache.length[slot]

        def put(into: Array, new: Array, at: tuple) -> Array:
            piece = jax.lax.dynamic_slice_in_dim(new, r, 1, axis=1).astype(into.dtype)
            old = jax.lax.dynamic_slice(into, at, piece.shape)
            return jax.lax.dynamic_update_slice(into, jnp.where(is_real, piece, old), at)

        return Cache(
            k=put(cache.k, entries.k, (0, slot, 0, start, 0)),
            v=put(cache.v, entries.v, (0, slot, 0, start, 0)),
            conv=put(cache.conv, entries.conv, (0, slot, 0, 0)),
            length=cache.length.at[slot].add(num_new[r]),
        )

    return jax.lax.fori_loop(0, slots.shape[0], write, cache)


@struct.dataclass
class Stage:
    """What a chunk of C decoding steps adds: [layers, B, K, C, H] keys and values, [layers, B, W - 1 + C, D] inputs."""

    k: Float[Array, "Y B K C H"]
    v: Float[Array, "Y B K C H"]
    conv: Float[Array, "Y B W-1+C D"]


def init_stage(cache: Cache, steps: int) -> Stage:
    """An empty stage for `steps` decoding steps after `cache`."""
    layers, rows, heads, _, head_dim = cache.k.shape
    empty = jnp.zeros((layers, rows, heads, steps, head_dim), cache.k.dtype)
    room = jnp.zeros((layers, rows, steps, cache.conv.shape[3]), cache.conv.dtype)
    return Stage(k=empty, v=empty, conv=jnp.concatenate([cache.conv, room], axis=2))


def staged_entries(stage: Stage, num_fed: Int[Array, " B"], width: int) -> Entries:
    """The stage as entries, with the convolution state (`width` inputs) that row b had after `num_fed[b]` tokens."""
    take = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width, axis=1), (1, 0), 1)
    return Entries(k=stage.k, v=stage.v, conv=take(stage.conv, num_fed))
