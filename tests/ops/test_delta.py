"""The gated delta rule: both forms against a plain loop, packed rows, and tokens that leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.ops.delta import delta_chunks, delta_step, l2_normalised

B, T, N, H, J = 2, 11, 3, 4, 5


@pytest.fixture
def arrays():
    """q, k, v, log_decay, beta and a state, float32."""
    rng = np.random.default_rng(0)
    q, k = (np.array(l2_normalised(rng.normal(size=(B, T, N, H)))) for _ in range(2))
    v, state = rng.normal(size=(B, T, N, J)), rng.normal(size=(B, N, H, J))
    log_decay, beta = -rng.exponential(size=(B, T, N)), rng.uniform(size=(B, T, N))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


def loop(q, k, v, log_decay, beta, state, segment_ids):
    y, state = np.zeros(v.shape), state.astype(np.float64)
    for b, n in np.ndindex(B, N):
        s = state[b, n]
        for t in range(T):
            if t and segment_ids[b, t] != segment_ids[b, t - 1]:
                s = np.zeros_like(s)
            s = np.exp(log_decay[b, t, n]) * s
            s = s + np.outer(k[b, t, n], beta[b, t, n] * (v[b, t, n] - s.T @ k[b, t, n]))
            y[b, t, n] = s.T @ q[b, t, n]
        state[b, n] = s
    return y, state


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize("segments", [[[1] * 11, [1] * 11], [[1] * 3 + [2] * 8, [1] * 4 + [2] + [3] * 2 + [0] * 4]])
def test_chunks_are_the_loop(arrays, chunk, segments):
    want = loop(*arrays, np.array(segments))
    got = delta_chunks(*arrays, jnp.array(segments), chunk=chunk)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_steps_are_the_loop(arrays):
    want, end = loop(*arrays, np.ones((B, T)))
    *inputs, state = arrays
    for t in range(T):
        y, state = delta_step(*(x[:, t] for x in inputs), state)
        np.testing.assert_allclose(y, want[:, t], atol=2e-5)
    np.testing.assert_allclose(state, end, atol=2e-5)


def test_gradients_of_both_forms_agree(arrays):
    ones = jnp.ones((B, T), jnp.int32)

    def of_chunks(arrays):
        y, state = delta_chunks(*arrays, ones, chunk=4)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state))

    def of_steps(arrays):
        *inputs, state = arrays
        state, y = jax.lax.scan(
            lambda state, x: delta_step(*x, state)[::-1], state, [jnp.swapaxes(x, 0, 1) for x in inputs]
        )
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state))

    got, want = jax.jit(jax.grad(of_chunks))(arrays), jax.jit(jax.grad(of_steps))(arrays)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_token_without_decay_and_beta_leaves_no_trace(arrays):
    q, k, v, log_decay, beta, state = arrays
    real = np.arange(T) < 7
    quiet = [np.where(real[:, None], x, 0) for x in (log_decay, beta)]
    poisoned = np.where(real[:, None, None], v, 1e6).astype(np.float32)
    _, got = delta_chunks(q, k, poisoned, *quiet, state, jnp.ones((B, T), jnp.int32), chunk=4)
    *inputs, _ = arrays
    _, want = delta_chunks(*(x[:, :7] for x in inputs), state, jnp.ones((B, 7), jnp.int32), chunk=4)
    np.testing.assert_allclose(got, want, atol=1e-5)
    _, after = delta_step(q[:, 0], k[:, 0], v[:, 0], 0 * beta[:, 0], 0 * beta[:, 0], state)
    np.testing.assert_array_equal(after, state)


def test_a_state_that_forgets_at_once_gives_no_nan(arrays):
    q, k, v, log_decay, beta, state = arrays
    sudden = np.full_like(log_decay, -1e4)

    def total(log_decay):
        y, end = delta_chunks(q, k, v, log_decay, beta, state, jnp.ones((B, T), jnp.int32))
        return jnp.sum(y) + jnp.sum(end)

    assert np.isfinite(total(sudden)) and np.isfinite(jax.grad(total)(sudden)).all()
