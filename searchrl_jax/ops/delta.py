"""The gated delta rule: a linear attention whose state forgets, and overwrites what it holds for a key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def l2_normalised(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def delta_step(
    q: Float[Array, "B N H"],
    k: Float[Array, "B N H"],
    v: Float[Array, "B N J"],
    log_decay: Float[Array, "B N"],
    beta: Float[Array, "B N"],
    state: Float[Array, "B N H J"],
) -> tuple[Float[Array, "B N J"], Float[Array, "B N H J"]]:
    """What one token reads, and the state after it.

        S_t = exp(log_decay_t) S_{t-1} + k_t (beta_t (v_t - (exp(log_decay_t) S_{t-1})^T k_t))^T        y_t = S_t^T q_t

    A token with log_decay = beta = 0 leaves the state as it is.

    Args:
        log_decay: <= 0.
        beta: in [0, 1]; how much of what the state holds for k is replaced.

    Source:
        Yang et al. 2024, arXiv:2412.06464, eq. 10, transposed.
    """
    state = state * jnp.exp(log_decay)[..., None, None]
    change = beta[..., None] * (v - jnp.einsum("BNHJ,BNH->BNJ", state, k))
    state = state + k[..., :, None] * change[..., None, :]
    return jnp.einsum("BNHJ,BNH->BNJ", state, q), state


def delta_chunks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N J"],
    log_decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N H J"],
    segment_ids: Int[Array, "B T"],
    *,
    chunk: int = 64,
) -> tuple[Float[Array, "B T N J"], Float[Array, "B N H J"]]:
    """`delta_step` over T tokens, `chunk` of them at a time in parallel; and the state after the last.

    Within a chunk, c_i is the sum of log_decay up to token i, and what token i writes is u_i:

        u_i = beta_i (v_i - exp(c_i) S^T k_i - sum_{j<i} exp(c_i - c_j) (k_j . k_i) u_j)        (a triangular system)
        y_i = exp(c_i) S^T q_i + sum_{j<=i} exp(c_i - c_j) (k_j . q_i) u_j
        S'  = exp(c_last) S + sum_j exp(c_last - c_j) k_j u_j^T

    and every term between tokens of two packed trajectories is 0. Exponents are never positive.

    Args:
        state: before the first token, of the same trajectory.
        segment_ids: the trajectory of each token; tokens of one stand together.

    Source:
        Yang et al. 2024, arXiv:2412.06464, section 3.3.
    """
    B, T = segment_ids.shape
    size = min(chunk, T)
    padding = -T % size

    def chunked(x: Array, mode: str = "constant") -> Array:
        """[chunks, B, N, size, ...] of [B, T, N, ...]; padding has log_decay = beta = 0."""
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)], mode=mode)
        x = x.reshape(B, -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, log_decay, beta = (chunked(x) for x in (q, k, v, log_decay, beta))
    segment = chunked(segment_ids[..., None], "edge")
    total = jnp.cumsum(log_decay, axis=-1)
    is_read = (segment[..., :, None] == segment[..., None, :]) & jnp.tri(size, dtype=bool)
    between = jnp.exp(jnp.where(is_read, total[..., :, None] - total[..., None, :], -jnp.inf))
    before = jnp.concatenate([segment[:1, ..., :1], segment[:-1, ..., -1:]])
    since_state = jnp.where(segment == before, jnp.exp(total), 0)

    key_products = jnp.einsum("cBNiH,cBNjH->cBNij", k, k) * between * beta[..., None]
    query_products = jnp.einsum("cBNiH,cBNjH->cBNij", q, k) * between
    inside = jnp.concatenate([v, since_state[..., None] * k], axis=-1) * beta[..., None]
    inside = jax.lax.linalg.triangular_solve(key_products, inside, left_side=True, lower=True, unit_diagonal=True)
    written, read = inside[..., : v.shape[-1]], inside[..., v.shape[-1] :]
    query_state = q * since_state[..., None]
    key_end = k * between[..., -1, :, None]

    def advance(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        written, read, products, query_state, key_end, decay = x
        u = written - read @ state
        y = query_state @ state + products @ u
        return decay[..., None, None] * state + jnp.swapaxes(key_end, -1, -2) @ u, y

    parts = (written, read, query_products, query_state, key_end, since_state[..., -1])
    state, y = jax.lax.scan(advance, state, parts)
    y = jnp.moveaxis(jnp.moveaxis(y, 0, 1), 2, 3).reshape(B, T + padding, *v.shape[2:3], v.shape[-1])
    return y[:, :T], state
