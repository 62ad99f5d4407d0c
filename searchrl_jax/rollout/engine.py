"""The slot engine: append what waits, then decode a chunk, in a short list of shapes.

What several slots of a device begin with is computed once and copied: the prompt of rollouts that begin together and,
where all that a decoder remembers are keys and values, whatever another slot begins with, too.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from searchrl_jax.models.cache import (
    Cache,
    Entries,
    Stage,
    copy_rows,
    first_entries,
    init_cache,
    init_stage,
    reset_all,
    reset_row,
    rows_of,
    staged_entries,
    write_rows,
)
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, apart, append, decode_step, together
from searchrl_jax.ops.sampling import sample

SHARED_AT_LEAST = 16  # tokens that two slots begin with, for which a copy is worth a call


@dataclass(frozen=True)
class Sampling:
    """The distribution that actions are drawn from; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Shapes:
    """The shapes that the engine compiles for; nothing else is ever compiled after they have been seen once.

    Attributes:
        slots: rollouts in flight.
        capacity: tokens of one rollout at the most.
        chunk: decoding steps between two looks at finished turns.
        append_rows: how many rows one append may take; ascending, the last is `slots`.
        append_tokens: how many tokens a row of one append may take; longer ones go in several appends.
        key_buckets: how many cached tokens attention reads; ascending, the last is >= `capacity`.
    """

    slots: int
    capacity: int
    chunk: int
    append_rows: tuple[int, ...]
    append_tokens: tuple[int, ...]
    key_buckets: tuple[int, ...]

    @staticmethod
    def choose(slots: int, capacity: int, chunk: int, observation: int) -> "Shapes":
        """Few shapes that waste little.

        Args:
            observation: tokens of the longest observation; appends are as wide, or 64 wide for short prompts.
        """
        rows = sorted({max(1, slots // share) for share in (1, 2, 4, 8)})
        wide = 32 * math.ceil(observation / 32)
        # Attention over cached keys is bound by memory, so a third less to read is a third less time. All of them are
        # read where they stand; fewer are copied first.
        keys = {128 * math.ceil(capacity * third / 384) for third in (1, 2)}
        keys = {key for key in keys if key < capacity} | {capacity + max(chunk, wide)}
        return Shapes(slots, capacity, chunk, tuple(rows), tuple(sorted({min(64, wide), wide})), tuple(sorted(keys)))

    @property
    def piece(self) -> int:
        """Tokens that one call adds to a slot at most."""
        return max(self.chunk, self.append_tokens[-1])

    @property
    def cache_length(self) -> int:
        """Entries allocated per slot: a write of any shape that begins inside the capacity stays inside the array."""
        return max(self.capacity + self.piece, self.key_buckets[-1])

    def empty_cache(self, config: DecoderConfig, dtype: Any = jnp.float32) -> Cache:
        """What the engine's slots begin with."""
        return init_cache(config, self.slots, self.cache_length, dtype, piece=self.piece)


def smallest_fitting(options: Sequence[int], size: int) -> int:
    """The least option that is at least `size`.

    Raises:
        ValueError: none is.
    """
    for option in options:
        if option >= size:
            return option
    raise ValueError(f"expected a size of at most {options[-1]}, got {size}; give the engine a larger shape")


@dataclass(frozen=True)
class Chunk:
    """What one decode call sampled: row b's first `count[b]` tokens are real."""

    tokens: Int[np.ndarray, "B C"]
    logprobs: Float[np.ndarray, "B C"]
    count: Int[np.ndarray, " B"]


class Engine:
    """Slots over one cache. The host keeps each slot's ids; the cache holds all of them but the last.

    A slot's last id is fed when its next token is decoded, or with the next append. So prompt, observation and stop
    token all go the same way, and no logits are carried from call to call.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shapes: Shapes,
        stop_ids: Sequence[int],
        run_key: Key[Array, ""],
        cache_sharding: Any = None,
        dtype: Any = jnp.float32,
    ) -> None:
        """An engine with empty slots.

        Args:
            stop_ids: the tokens that end a turn.
            run_key: all sampling follows from it, a trajectory's uid and a token's position.
            cache_sharding: a `Cache` with a NamedSharding in the place of each array; None for one device.
            dtype: of what the cache holds; that of the activations.
        """
        self.config, self.shapes, self.stop_ids, self.run_key = config, shapes, tuple(stop_ids), run_key
        self.cache = shapes.empty_cache(config, dtype)
        # The slots of one share of the rows, and how many shares there are: a device sees the rows of one.
        self._shard_slots = shapes.slots
        if cache_sharding is not None:
            (self._shard_slots,) = cache_sharding.length.shard_shape((shapes.slots,))
        self._shards = shapes.slots // self._shard_slots
        # Only what each row holds of every layer can be cut short.
        self._is_positional = not any(x.size for x in (*self.cache.conv, *self.cache.state)) and not any(
            self.cache.is_ring
        )
        if cache_sharding is not None:
            self.cache = jax.device_put(self.cache, cache_sharding)
        self.ids: list[list[int]] = [[] for _ in range(shapes.slots)]
        self.held = np.zeros(shapes.slots, np.int64)  # tokens of each slot that the cache holds
        self.uids = np.zeros(shapes.slots, np.uint32)
        # Tokens of each slot's trajectory that its cache no longer begins with.
        self.offsets = np.zeros(shapes.slots, np.int32)
        # The cache stays where it is, or each call would compile anew for the last one's placement.
        self._append = jax.jit(
            functools.partial(_append_rows, config, cache_sharding),
            donate_argnames="cache",
            static_argnames="bucket",
            out_shardings=cache_sharding,
        )
        self._copy = jax.jit(
            functools.partial(_copy_rows, cache_sharding),
            donate_argnames="cache",
            static_argnames="bucket",
            out_shardings=cache_sharding,
        )
        self._decode = decode_program(config, shapes, self.stop_ids, cache_sharding)
        self._reset = jax.jit(reset_row, donate_argnames="cache", out_shardings=cache_sharding)
        self._empty = jax.jit(reset_all, donate_argnames="cache", out_shardings=cache_sharding)

    def start(self, slot: int, uid: int, ids: Sequence[int], offset: int = 0) -> None:
        """Gives `slot` to the trajectory `uid`, which begins with `ids`; what the slot held is forgotten.

        Args:
            offset: tokens of the trajectory before these, where it goes on with another history: what is sampled next
                has a position in the whole, and so a random key of its own.
        """
        if not ids:
            raise ValueError("expected at least one prompt token, got none; render a prompt first")
        self.ids[slot], self.held[slot], self.uids[slot], self.offsets[slot] = list(ids), 0, uid, offset
        self.cache = self._reset(self.cache, slot)

    def extend(self, slot: int, ids: Sequence[int]) -> None:
        """Adds an observation's ids to `slot`; they reach the cache with the next `flush`."""
        self.ids[slot].extend(ids)

    def release(self, slot: int) -> None:
        """Frees `slot`: its trajectory is over."""
        self.ids[slot] = []

    def forget(self) -> None:
        """Empties the cache and keeps every slot's ids: the next `flush` computes all of them with the weights it gets.

        Called between the last use of old weights and the first of new ones, so that no key, value or convolution
        input of the old is ever attended to by the new.
        """
        self.held[:] = 0
        self.cache = self._empty(self.cache)

    def set_aside(self) -> list[tuple[int, int, list[int]]]:
        """Frees every slot for other rollouts, and returns what `put_back` needs: each slot's uid, offset and ids."""
        aside = [(int(u), int(o), ids) for u, o, ids in zip(self.uids, self.offsets, self.ids, strict=True)]
        self.ids = [[] for _ in self.ids]
        return aside

    def put_back(self, aside: Sequence[tuple[int, int, list[int]]]) -> None:
        """The slots as they were before `set_aside`; their cache is computed anew."""
        self.uids = np.array([uid for uid, _, _ in aside], np.uint32)
        self.offsets = np.array([offset for _, offset, _ in aside], np.int32)
        self.ids = [ids for _, _, ids in aside]
        self.forget()

    def flush(self, params: Params) -> None:
        """Brings the cache up to date: appends all that waits, every slot's ids but the last."""
        while self.append_waiting(params):
            pass

    def append_waiting(self, params: Params) -> bool:
        """Appends one piece of what waits, in all slots where something does; whether more waits then.

        A slot that begins as another does waits for that one, and then takes a copy of what both begin with.
        """
        shapes = self.shapes
        fed = {slot: len(ids) - 1 for slot, ids in enumerate(self.ids) if ids}
        following = self._follow(fed)
        missing = {s: count - self.held[s] for s, count in fed.items() if count > self.held[s] and s not in following}
        if missing:
            widest = max(missing.values())
            width = smallest_fitting(shapes.append_tokens, min(widest, shapes.append_tokens[-1]))
            places = self._by_shard(missing)
            rows = smallest_fitting([max(1, n // self._shards) for n in shapes.append_rows], max(map(len, places)))
            tokens = np.zeros((self._shards * rows, width), np.int32)
            num_new = np.zeros(self._shards * rows, np.int32)
            slot_index = np.zeros(self._shards * rows, np.int32)
            bucket = smallest_fitting(shapes.key_buckets, int(max(self.held[slot] for slot in missing)))
            for shard, slots in enumerate(places):
                for row, slot in enumerate(slots, start=shard * rows):
                    held = self.held[slot]
                    piece = self.ids[slot][held : held + min(missing[slot], width)]
                    tokens[row, : len(piece)] = piece
                    num_new[row], slot_index[row] = len(piece), slot % self._shard_slots
                    self.held[slot] += len(piece)
            self.cache = self._append(params, self.cache, tokens, num_new, slot_index, bucket=bucket)
        return any(self.held[slot] < count for slot, count in fed.items())

    def _follow(self, fed: Mapping[int, int]) -> set[int]:
        """Copies to empty slots what others hold of their beginning; the empty slots for which that is still to come.

        Args:
            fed: how many of its ids each slot's cache is to hold.
        """
        following: set[int] = set()
        fresh = [slot for slot, count in fed.items() if count and not self.held[slot]]
        if not fresh:
            return following
        longest, copies = max(fed[slot] for slot in fresh), []
        begins = {slot: np.array(self.ids[slot][: min(count, longest)], np.int32) for slot, count in fed.items()}
        for slot in fresh:
            shared = {
                other: _num_equal(begin, begins[slot])
                for other, begin in begins.items()
                if (self.held[other] or other < slot) and other // self._shard_slots == slot // self._shard_slots
            }
            shared = {
                other: n
                for other, n in shared.items()
                if n >= SHARED_AT_LEAST and (self._is_positional or n == fed[other])
            }
            if not shared:
                continue
            # Of equals the first, which waits for none of them. What is still to come must be worth a call more.
            come = max(shared, key=lambda other: (shared[other], -other))
            there = max((o for o in shared if self.held[o] >= shared[o]), key=lambda o: shared[o], default=None)
            if there is None or shared[come] >= shared[there] + SHARED_AT_LEAST:
                following.add(slot)
            else:
                copies.append((there, slot, shared[there]))
        if copies:
            self._copy_all(copies)
        return following

    def _copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies: from this slot, to that one, so many tokens."""
        sources, targets, lengths = np.zeros((3, self.shapes.slots), np.int32)
        rows = self._shard_slots
        by_target = {target: (source, length) for source, target, length in copies}
        for shard, slots in enumerate(self._by_shard(by_target)):
            for at, target in enumerate(slots, start=shard * rows):
                source, length = by_target[target]
                sources[at], targets[at], lengths[at] = source % rows, target % rows, length
                self.held[target] = length
        bucket = smallest_fitting(self.shapes.key_buckets, max(length for _, _, length in copies))
        self.cache = self._copy(self.cache, sources, targets, lengths, bucket=bucket)

    def _by_shard(self, slots: Iterable[int]) -> list[list[int]]:
        """Those of `slots` that each share of the rows holds."""
        shares: list[list[int]] = [[] for _ in range(self._shards)]
        for slot in slots:
            shares[slot // self._shard_slots].append(slot)
        return shares

    def decode(self, params: Params, budget: Int[np.ndarray, " B"], sampling: Sampling) -> Chunk:
        """Up to `shapes.chunk` further tokens of each slot with `budget[b] > 0`, at most `budget[b]` of them.

        A row stops at the end of its turn. The sampled tokens are added to `ids`.
        """
        is_live = budget > 0
        last = np.array([ids[-1] if ids else 0 for ids in self.ids], np.int32)
        longest = max(len(ids) for ids, live in zip(self.ids, is_live, strict=True) if live)
        bucket = smallest_fitting(self.shapes.key_buckets, longest)
        self.cache, *sampled = self._decode(
            params,
            self.cache,
            self.run_key,
            self.uids,
            self.offsets,
            last,
            budget.astype(np.int32),
            bucket=bucket,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        tokens, logprobs, count = (np.asarray(x) for x in sampled)
        for slot in np.flatnonzero(count):
            self.ids[slot].extend(tokens[slot, : count[slot]].tolist())
        self.held += count
        return Chunk(tokens, logprobs, count)


def decode_program(config: DecoderConfig, shapes: Shapes, stop_ids: Sequence[int], cache_sharding: Any = None) -> Any:
    """What `Engine.decode` runs, as `jax.jit` gives it."""
    # The host of every process reads all that was sampled.
    sampled = None if cache_sharding is None else NamedSharding(cache_sharding.length.mesh, PartitionSpec())
    return jax.jit(
        functools.partial(_decode_chunk, config, shapes.chunk, tuple(stop_ids), cache_sharding),
        donate_argnames="cache",
        static_argnames=("bucket", "temperature", "top_p"),
        out_shardings=(cache_sharding, sampled, sampled, sampled),
    )


def _mesh_of(cache_sharding: Any) -> Mesh | None:
    """The mesh of several devices that the cache lies on, if it does."""
    mesh = None if cache_sharding is None else cache_sharding.length.mesh
    return mesh if mesh is not None and mesh.size > 1 else None


def _by_device(change: Callable[..., Cache], cache_sharding: Any) -> Callable[..., Cache]:
    """`change` of a cache, as each device makes it to its own rows and to none of another's.

    Args:
        change: takes a cache and what is given by row: entries, a stage, numbers. Slots count among a device's own.
    """
    mesh = _mesh_of(cache_sharding)
    if mesh is None:
        return change
    specs = jax.tree.map(lambda sharding: sharding.spec, cache_sharding)

    def spec_of(value: Any) -> Any:
        if isinstance(value, Entries | Stage):
            return type(value)(specs.k, specs.v, specs.conv, specs.state)
        return specs if isinstance(value, Cache) else specs.length

    def spread(*values: Any) -> Cache:
        return jax.shard_map(change, mesh=mesh, in_specs=tuple(map(spec_of, values)), out_specs=specs)(*values)

    return spread


def _num_equal(some: Int[np.ndarray, " n"], others: Int[np.ndarray, " m"]) -> int:
    """With how many equal ids both begin."""
    count = min(len(some), len(others))
    differs = some[:count] != others[:count]
    return int(differs.argmax()) if differs.any() else count


def _copy_rows(
    cache_sharding: Any,
    cache: Cache,
    sources: Int[Array, " B"],
    targets: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    bucket: int,
) -> Cache:
    copy = functools.partial(copy_rows, bucket=bucket)
    return _by_device(copy, cache_sharding)(cache, sources, targets, lengths)


def _append_rows(
    config: DecoderConfig,
    cache_sharding: Any,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "R T"],
    num_new: Int[Array, " R"],
    slots: Int[Array, " R"],
    *,
    bucket: int,
) -> Cache:
    """The cache with `tokens[r, :num_new[r]]` appended to slot `slots[r]`; rows with `num_new` 0 are padding.

    Where rows are spread, each device appends to its own, and `slots` counts among these.
    """
    rows = _by_device(functools.partial(rows_of, bucket=bucket), cache_sharding)(cache, slots)
    _, entries = append(config, params, rows, tokens, num_new, mesh=_mesh_of(cache_sharding))
    return _by_device(write_rows, cache_sharding)(cache, entries, num_new, slots)


def _decode_chunk(
    config: DecoderConfig,
    steps: int,
    stop_ids: tuple[int, ...],
    cache_sharding: Any,
    params: Params,
    cache: Cache,
    run_key: Key[Array, ""],
    uids: Int[Array, " B"],
    offsets: Int[Array, " B"],
    last: Int[Array, " B"],
    budget: Int[Array, " B"],
    *,
    bucket: int,
    temperature: float,
    top_p: float,
) -> tuple[Cache, Int[Array, "B C"], Float[Array, "B C"], Int[Array, " B"]]:
    """Feeds each live row's last token and samples the next, `steps` times or until no row is live."""
    B = last.shape[0]
    rows = first_entries(cache, bucket)
    layers = apart(config, (params["layers"], rows.k, rows.v))
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(run_key, uids)

    def is_running(state: tuple) -> Bool[Array, ""]:
        return (state[0] < steps) & jnp.any(state[3])

    def advance(state: tuple) -> tuple:
        i, stage, last, is_live, count, tokens, logprobs = state
        weights, k, v = together(config, layers)
        held = replace(rows, k=k, v=v)
        logits, stage = decode_step(config, params | {"layers": weights}, held, stage, i, last, is_live)
        keys = jax.vmap(jax.random.fold_in)(row_keys, offsets + cache.length + i + 1)
        token, logprob = sample(keys, logits, temperature=temperature, top_p=top_p)
        token = jnp.where(is_live, token, last)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)
        logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, logprob[:, None], i, axis=1)
        count = count + is_live
        is_live = is_live & ~jnp.isin(token, jnp.array(stop_ids)) & (count < budget)
        return i + 1, stage, token, is_live, count, tokens, logprobs

    state = (
        jnp.int32(0),
        init_stage(cache, steps),
        last,
        budget > 0,
        jnp.zeros(B, jnp.int32),
        jnp.zeros((B, steps), jnp.int32),
        jnp.zeros((B, steps), jnp.float32),
    )
    _, stage, _, _, count, tokens, logprobs = jax.lax.while_loop(is_running, advance, state)
    return _by_device(_write_stage, cache_sharding)(cache, stage, count), tokens, logprobs, count


def _write_stage(cache: Cache, stage: Stage, count: Int[Array, " B"]) -> Cache:
    """The cache after row b took `count[b]` tokens of the stage."""
    return write_rows(cache, staged_entries(stage, count), count, jnp.arange(count.shape[0]))
