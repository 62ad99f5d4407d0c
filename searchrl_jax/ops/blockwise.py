"""Causal attention of long packed rows, in memory that grows with their length and not with its square."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 512
NOTHING = -1e30  # the score of a key that must not be read


def blocks_read(length: int, window: int | None = None, block: int = BLOCK) -> float:
    """How many key blocks a query block of a row of `length` tokens looks at, on average."""
    count = -(-length // block)
    first = [0 if window is None else max(i * block + 1 - window, 0) // block for i in range(count)]
    return sum(i + 1 - start for i, start in enumerate(first)) / count


def attend_in_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segment_ids: Int[Array, "B T"],
    *,
    block: int = BLOCK,
    window: int | None = None,
    scale: float | None = None,
    sink: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """`ops.attention.attend` within packed rows, `block` queries by `block` keys at a time.

    Scores are made block by block, with a running peak and sum, and made again in the backward pass:

        peak' = max(peak, max_s score_s)        total' = total exp(peak - peak') + sum_s exp(score_s - peak')

    Blocks that no query may read, by order or by `window`, are not computed.

    Source:
        Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3; Dao 2023, arXiv:2307.08691, section 3.1.
    """
    B, T, N, H = q.shape
    K = k.shape[1]
    q_BKGTH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * (H**-0.5 if scale is None else scale)
    padding = -T % block
    q_BKGTH, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)]) for x in (q_BKGTH, k, v))
    segment_ids = jnp.pad(segment_ids, [(0, 0), (0, padding)], constant_values=-1)
    sink = jnp.full(N, NOTHING) if sink is None else sink.astype(jnp.float32)
    mixed = _attend(block, window, q_BKGTH, k, v, segment_ids, sink.reshape(K, N // K, 1))
    return mixed[:, :, :, :T].transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    block: int,
    window: int | None,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    segment_ids: Int[Array, "B T"],
    sink: Float[Array, "K G 1"],
) -> Float[Array, "B K G T H"]:
    return _forward(block, window, q, k, v, segment_ids, sink)[0]


def _forward(
    block: int, window: int | None, q: Array, k: Array, v: Array, segment_ids: Array, sink: Array
) -> tuple[Array, tuple[Array, ...]]:
    """What is read, and what the backward pass needs: the logarithm of each query's total among it."""
    count = q.shape[3] // block

    def of_queries(i: Array) -> tuple[Array, Array]:
        q_i = _part(q, i, block, 3)

        def add(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            mixed, peak, total = state
            score = _scores(block, window, q_i, k, segment_ids, i, j)
            higher = jnp.maximum(peak, jnp.max(score, axis=-1))
            weight, shrink = jnp.exp(score - higher[..., None]), jnp.exp(peak - higher)
            read = _product("BKGTS,BKSH->BKGTH", weight.astype(v.dtype), _part(v, j, block, 2))
            return mixed * shrink[..., None] + read, higher, total * shrink + jnp.sum(weight, axis=-1)

        peak = jnp.broadcast_to(sink, q_i.shape[:4])
        first = 0 if window is None else jnp.maximum(i * block + 1 - window, 0) // block
        start = (jnp.zeros(q_i.shape, jnp.float32), peak, jnp.ones_like(peak))
        mixed, peak, total = jax.lax.fori_loop(first, i + 1, add, start)
        return (mixed / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    mixed, log_total = jax.lax.map(of_queries, jnp.arange(count))
    mixed, log_total = _whole(mixed), _whole(log_total[..., None])[..., 0]
    return mixed, (q, k, v, segment_ids, sink, mixed, log_total)


def _backward(block: int, window: int | None, kept: tuple[Array, ...], grad: Array) -> tuple[Any, ...]:
    """With P the weights and dP = grad v^T: d score = P (dP - sum_s P dP), and the sum is grad . mixed."""
    q, k, v, segment_ids, sink, mixed, log_total = kept
    count = q.shape[3] // block
    shared = jnp.sum(grad.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)

    def of_keys(grad_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k_j, v_j = (_part(x, j, block, 2) for x in (k, v))

        def add(after: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            i, (grad_q, grad_k, grad_v) = j + after, state
            q_i, grad_i = (_part(x, i, block, 3) for x in (q, grad))
            score = _scores(block, window, q_i, k, segment_ids, i, j)
            weight = jnp.exp(score - _part(log_total, i, block, 3)[..., None])
            grad_v += _product("BKGTS,BKGTH->BKSH", weight.astype(v.dtype), grad_i)
            grad_weight = _product("BKGTH,BKSH->BKGTS", grad_i, v_j)
            grad_score = (weight * (grad_weight - _part(shared, i, block, 3)[..., None])).astype(q.dtype)
            grad_k += _product("BKGTS,BKGTH->BKSH", grad_score, q_i)
            grad_q_i = _part(grad_q, i, block, 3) + _product("BKGTS,BKSH->BKGTH", grad_score, k_j)
            return jax.lax.dynamic_update_slice_in_dim(grad_q, grad_q_i, i * block, 3), grad_k, grad_v

        last = count if window is None else jnp.minimum((j * block + block + window - 2) // block + 1, count)
        zeros = jnp.zeros(k_j.shape, jnp.float32)
        grad_q, grad_k, grad_v = jax.lax.fori_loop(0, last - j, add, (grad_q, zeros, zeros))
        return grad_q, (grad_k.astype(k.dtype), grad_v.astype(v.dtype))

    grad_q, (grad_k, grad_v) = jax.lax.scan(of_keys, jnp.zeros(q.shape, jnp.float32), jnp.arange(count))
    # A sink is a key whose value is 0, so that its dP is 0.
    grad_sink = -jnp.sum(jnp.exp(sink - log_total) * shared, axis=(0, 3))[..., None]
    return grad_q.astype(q.dtype), _whole(grad_k), _whole(grad_v), None, grad_sink


_attend.defvjp(_forward, _backward)


def _scores(
    block: int, window: int | None, q_i: Array, k: Array, segment_ids: Array, i: Array, j: Array
) -> Float[Array, "B K G t s"]:
    """The scores of query block `i` on key block `j`; `NOTHING` where a query must not read."""
    score = _product("BKGTH,BKSH->BKGTS", q_i, _part(k, j, block, 2))
    distance = (i * block + jnp.arange(block))[:, None] - (j * block + jnp.arange(block))[None, :]
    may_read = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    of_query, of_key = (_part(segment_ids, each, block, 1) for each in (i, j))
    may_read = may_read[None] & (of_query[:, :, None] == of_key[:, None, :])
    return jnp.where(may_read[:, None, None], score, NOTHING)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _part(x: Array, index: Array, block: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _whole(parts: Float[Array, "C ... t H"]) -> Float[Array, "... T H"]:
    """Blocks of tokens, put together."""
    parts = jnp.moveaxis(parts, 0, -3)
    return parts.reshape(*parts.shape[:-3], -1, parts.shape[-1])
