"""Grouped-query attention over several blocks of keys: cached, staged and new."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.ops.blockwise import attend_in_blocks

# Above it a row's mask and scores are made block by block: at 65,536 tokens the mask alone would be 4 GiB.
LONG_ROW = 2048


@struct.dataclass
class KeyBlock:
    """Keys and values that a query may attend to, and which of them it may.

    `k` and `v` are [B, K, S, H]; `mask` broadcasts to [B, T, S] and is true where query t may read key s.
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    mask: Bool[Array, "#B #T S"]


def attend(
    q: Float[Array, "B T N H"],
    blocks: Sequence[KeyBlock],
    *,
    scale: float | None = None,
    sink: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(scale q k^T) v, over the keys of all blocks together.

    Query head n reads key head n // (N / K). Scores and softmax are float32. A query that may read nothing
    (padding) gets the mean of all values, which nobody reads.

    Args:
        scale: of the scores; None for 1 / sqrt(H).
        sink: a score per head of a key whose value is 0, which every query may read.

    Source:
        Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention); Xiao et al. 2023, arXiv:2309.17453 (sinks).
    """
    B, T, N, H = q.shape
    K = blocks[0].k.shape[1]
    q_BKGTH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * (H**-0.5 if scale is None else scale)
    scores = []
    for block in blocks:
        # With the keys first, XLA multiplies a single query by them faster on a CPU.
        score = jnp.einsum("BKSH,BKGTH->BKSGT", block.k, q_BKGTH, preferred_element_type=jnp.float32)
        score = jnp.moveaxis(score, 2, -1)
        scores.append(jnp.where(block.mask[:, None, None], score, -1e30))
    peak = jnp.max(jnp.stack([jnp.max(score, axis=-1, keepdims=True) for score in scores]), axis=0)
    if sink is not None:
        sink_KGTS = sink.astype(jnp.float32).reshape(K, N // K, 1, 1)
        peak = jnp.maximum(peak, sink_KGTS)
    peak = jax.lax.stop_gradient(peak)
    weights = [jnp.exp(score - peak) for score in scores]
    total = functools.reduce(jnp.add, [jnp.sum(weight, axis=-1, keepdims=True) for weight in weights])
    if sink is not None:
        total = total + jnp.exp(sink_KGTS - peak)
    parts = [
        jnp.einsum("BKGTS,BKSH->BKGTH", weight.astype(q.dtype), block.v, preferred_element_type=jnp.float32)
        for weight, block in zip(weights, blocks, strict=True)
    ]
    mixed = functools.reduce(jnp.add, parts)
    return (mixed / total).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_causally(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segment_ids: Int[Array, "B T"],
    *,
    chunk: int = 128,
    window: int | None = None,
    scale: float | None = None,
    sink: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """`attend` within packed rows, `chunk` queries at a time, without the keys that none of them may read.

    At T = 512 that is 62 % of the scores, and the largest array is T / chunk times smaller. Rows above `LONG_ROW`
    tokens are for `ops.blockwise`.

    Args:
        window: keys that a query reads at most, its own among them; None for all.
    """
    T = q.shape[1]
    if T > LONG_ROW:
        return attend_in_blocks(q, k, v, segment_ids, window=window, scale=scale, sink=sink)
    mask = causal_mask(segment_ids, window)
    mixed = []
    for start in range(0, T, chunk):
        end = min(start + chunk, T)
        first = 0 if window is None else max(0, start + 1 - window)
        block = KeyBlock(k[:, :, first:end], v[:, :, first:end], mask[:, start:end, first:end])
        mixed.append(attend(q[:, start:end], [block], scale=scale, sink=sink))
    return jnp.concatenate(mixed, axis=1)


def causal_mask(segment_ids: Int[Array, "B T"], window: int | None = None) -> Bool[Array, "B T T"]:
    """True where key s is at or before query t, less than `window` before it, and of the same packed trajectory.

    For segment_ids = [1, 1, 2]:
        1 0 0
        1 1 0
        0 0 1
    """
    T = segment_ids.shape[1]
    earlier = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    if window is not None:
        earlier = earlier & (jnp.arange(T)[:, None] - jnp.arange(T)[None, :] < window)
    return earlier[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
