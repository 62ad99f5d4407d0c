"""What a decoder remembers of each row: keys, values, convolution inputs and recurrent states."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from searchrl_jax.models.config import DecoderConfig


@struct.dataclass
class Cache:
    """The state of B rows; row b holds `length[b]` tokens.

    Each field has an array per layer of the period, with a leading axis Y over periods; what a layer has no use for is
    of size 0. The token at position p stands at entry p of `k` and `v` or, where the layer's window lets it hold fewer
    (`is_ring`), at p mod S. Other entries are garbage that no query reads: `cached_positions` gives them none or, in a
    ring, one behind the window.
    """

    k: tuple[Float[Array, "Y B K S H"], ...]
    v: tuple[Float[Array, "Y B K S H"], ...]
    conv: tuple[Float[Array, "Y B W-1 I"], ...]
    state: tuple[Float[Array, "Y B N H J"], ...]
    length: Int[Array, " B"]
    is_ring: tuple[bool, ...] = struct.field(pytree_node=False)


def init_cache(
    config: DecoderConfig, rows: int, capacity: int, dtype: jnp.dtype = jnp.float32, *, piece: int | None = None
) -> Cache:
    """An empty cache of `rows` rows of `capacity` tokens. Recurrent states are float32 whatever `dtype`.

    Args:
        piece: tokens that one write adds at most: a layer with a window then holds window + piece entries. What a write
            overwrites, padding included, is then behind the window of whatever comes next. None for `capacity` in all.
    """
    sizes = [
        capacity if piece is None or layer.window is None else min(capacity, layer.window + piece)
        for layer in config.period
    ]

    def keys() -> tuple[Array, ...]:
        shapes = [
            (each.num_kv_heads, size, each.head_dim) if each.kind == "attention" else (0, capacity, 0)
            for each, size in zip(config.period, sizes, strict=True)
        ]
        return tuple(jnp.zeros((config.num_periods, rows, *shape), dtype) for shape in shapes)

    conv, state = empty_states(config, rows, dtype)
    is_ring = tuple(size < capacity for size in sizes)
    return Cache(k=keys(), v=keys(), conv=conv, state=state, length=jnp.zeros(rows, jnp.int32), is_ring=is_ring)


def cached_positions(size: int, length: Int[Array, " B"]) -> Int[Array, "B S"]:
    """The position of the token at each of `size` entries of rows of `length` tokens; below 0 where there is none.

        entry s:  the largest p < length with p = s (mod size)

    Args:
        size: of a ring, all of it or, as of any other layer, so many of its first entries that every row is in them.
    """
    return length[:, None] - 1 - (length[:, None] - 1 - jnp.arange(size)) % max(size, 1)


def empty_states(
    config: DecoderConfig, rows: int, dtype: jnp.dtype
) -> tuple[tuple[Float[Array, "Y B W-1 I"], ...], tuple[Float[Array, "Y B N H J"], ...]]:
    """Convolution inputs and recurrent states before any token, by layer of the period."""
    conv, state = [], []
    for layer in config.period:
        inputs, heads = (max(config.conv_width - 1, 0), config.model_dim), (0, 0, 0)
        if layer.kind == "delta" and (delta := config.delta):
            inputs = (delta.conv_width - 1, delta.channels)
            heads = (delta.num_value_heads, delta.key_dim, delta.value_dim)
        conv.append(jnp.zeros((config.num_periods, rows, *inputs), dtype))
        state.append(jnp.zeros((config.num_periods, rows, *heads), jnp.float32))
    return tuple(conv), tuple(state)


@struct.dataclass
class Entries:
    """What T new tokens per row add: keys and values [Y, B, K, T, H], and the states after them."""

    k: tuple[Float[Array, "Y B K T H"], ...]
    v: tuple[Float[Array, "Y B K T H"], ...]
    conv: tuple[Float[Array, "Y B W-1 I"], ...]
    state: tuple[Float[Array, "Y B N H J"], ...]


def rows_of(cache: Cache, slots: Int[Array, " R"], bucket: int) -> Cache:
    """The first `bucket` entries of the rows `slots`, as a cache of their own."""
    return Cache(
        k=tuple(k[:, slots, :, :bucket] for k in cache.k),
        v=tuple(v[:, slots, :, :bucket] for v in cache.v),
        conv=tuple(conv[:, slots] for conv in cache.conv),
        state=tuple(state[:, slots] for state in cache.state),
        length=cache.length[slots],
        is_ring=cache.is_ring,
    )


def first_entries(cache: Cache, bucket: int) -> Cache:
    """All rows, with their first `bucket` entries."""
    k, v = (tuple(each[:, :, :, :bucket] for each in arrays) for arrays in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def reset_row(cache: Cache, slot: Int[Array, ""]) -> Cache:
    """The cache without the tokens of `slot`. Its keys and values stay, past its length, where nobody reads them."""
    # A mask, since an index would bring the rows of all devices together.
    is_kept = jnp.arange(cache.length.shape[0]) != slot

    def kept(x: Array) -> Array:
        return jnp.where(is_kept.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)

    conv, state = (tuple(kept(x) for x in arrays) for arrays in (cache.conv, cache.state))
    return dataclasses.replace(cache, conv=conv, state=state, length=jnp.where(is_kept, cache.length, 0))


def reset_all(cache: Cache) -> Cache:
    """The cache without the tokens of any row."""
    conv, state, length = jax.tree.map(jnp.zeros_like, (cache.conv, cache.state, cache.length))
    return dataclasses.replace(cache, conv=conv, state=state, length=length)


def write_rows(cache: Cache, entries: Entries, num_new: Int[Array, " R"], slots: Int[Array, " R"]) -> Cache:
    """The cache after row `slots[r]` took the first `num_new[r]` tokens of `entries`; none where `num_new[r]` is 0.

    What stands past `num_new[r]` is written too, where nobody reads it: past the row's new length or, in a ring, behind
    the window. The caller leaves room for it: length + T <= S, or `dynamic_update_slice` would move the write back over
    valid entries; in a ring window + T <= S.
    """

    def write(r: Int[Array, ""], cache: Cache) -> Cache:
        slot, is_real = slots[r], num_new[r] > 0
        start = cache.length[slot]

        def put(into: Array, new: Array, at: tuple) -> Array:
            piece = jax.lax.dynamic_slice_in_dim(new, r, 1, axis=1).astype(into.dtype)
            old = jax.lax.dynamic_slice(into, at, piece.shape)
            return jax.lax.dynamic_update_slice(into, jnp.where(is_real, piece, old), at)

        def put_all(into: tuple[Array, ...], new: tuple[Array, ...], at: tuple) -> tuple[Array, ...]:
            return tuple(put(*pair, at) for pair in zip(into, new, strict=True))

        def put_around(into: Array, new: Array) -> Array:
            size, at = into.shape[3], (0, slot, 0, 0, 0)
            since = (jnp.arange(size) - start) % size  # new tokens before the one that an entry takes
            row = jax.lax.dynamic_slice(into, at, (into.shape[0], 1, *into.shape[2:]))
            piece = jax.lax.dynamic_slice_in_dim(new, r, 1, axis=1).astype(into.dtype)
            taken = jnp.take(piece, since, axis=3, mode="clip")
            is_new = (since < piece.shape[3])[:, None] & is_real
            return jax.lax.dynamic_update_slice(into, jnp.where(is_new, taken, row), at)

        def put_entries(into: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(
                put_around(old, added) if is_ring else put(old, added, (0, slot, 0, start, 0))
                for old, added, is_ring in zip(into, new, cache.is_ring, strict=True)
            )

        return Cache(
            k=put_entries(cache.k, entries.k),
            v=put_entries(cache.v, entries.v),
            conv=put_all(cache.conv, entries.conv, (0, slot, 0, 0)),
            state=put_all(cache.state, entries.state, (0, slot, 0, 0, 0)),
            length=cache.length.at[slot].add(num_new[r]),
            is_ring=cache.is_ring,
        )

    return jax.lax.fori_loop(0, slots.shape[0], write, cache)


def copy_rows(
    cache: Cache, sources: Int[Array, " N"], targets: Int[Array, " N"], lengths: Int[Array, " N"], bucket: int
) -> Cache:
    """The cache after row `targets[n]` became row `sources[n]`, of which it holds the first `lengths[n]` tokens.

    A row with convolution inputs, recurrent states or rings can only be copied whole: they end with its last token.

    Args:
        lengths: at most `bucket`; zeros, for nothing to copy, come last.
        bucket: keys and values to copy.
    """

    def copy(n: Int[Array, ""], cache: Cache) -> Cache:
        source, target = sources[n], targets[n]

        def put(x: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(x, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, row, target, axis=1)

        def put_entries(x: Array) -> Array:
            periods, _, heads, size, width = x.shape
            row = jax.lax.dynamic_slice(x, (0, source, 0, 0, 0), (periods, 1, heads, min(bucket, size), width))
            return jax.lax.dynamic_update_slice(x, row, (0, target, 0, 0, 0))

        return Cache(
            k=tuple(put_entries(k) for k in cache.k),
            v=tuple(put_entries(v) for v in cache.v),
            conv=tuple(put(conv) for conv in cache.conv),
            state=tuple(put(state) for state in cache.state),
            length=cache.length.at[target].set(lengths[n]),
            is_ring=cache.is_ring,
        )

    return jax.lax.fori_loop(0, jnp.sum(lengths > 0), copy, cache)


@struct.dataclass
class Stage:
    """What a chunk of C decoding steps adds.

    [Y, B, K, C, H] keys and values, [Y, B, W - 1 + C, I] convolution inputs, and the recurrent states so far.
    """

    k: tuple[Float[Array, "Y B K C H"], ...]
    v: tuple[Float[Array, "Y B K C H"], ...]
    conv: tuple[Float[Array, "Y B W-1+C I"], ...]
    state: tuple[Float[Array, "Y B N H J"], ...]


def init_stage(cache: Cache, steps: int) -> Stage:
    """An empty stage for `steps` decoding steps after `cache`."""
    empty = tuple(jnp.zeros((*k.shape[:3], steps, k.shape[4]), k.dtype) for k in cache.k)
    conv = []
    for before in cache.conv:
        room = jnp.zeros((*before.shape[:2], steps, before.shape[3]), before.dtype)
        conv.append(jnp.concatenate([before, room], axis=2))
    return Stage(k=empty, v=empty, conv=tuple(conv), state=cache.state)


def staged_entries(stage: Stage, num_fed: Int[Array, " B"]) -> Entries:
    """The stage as entries, with the convolution inputs that row b had after `num_fed[b]` tokens.

    Args:
        num_fed: in how many steps each row was live, from the first on.
    """
    steps = stage.k[0].shape[3]

    def take(conv: Float[Array, "Y B W-1+C I"]) -> Float[Array, "Y B W-1 I"]:
        width = conv.shape[2] - steps
        of_row = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, width, axis=1), (1, 0), 1)
        return of_row(conv, num_fed)

    return Entries(k=stage.k, v=stage.v, conv=tuple(take(conv) for conv in stage.conv), state=stage.state)
