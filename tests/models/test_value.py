"""The value head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from searchrl_jax.models.value import init_value_head, values
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

CONFIG = tiny_decoder_config(30)
PARAMS = tiny_params(CONFIG, 0)
# Compiled once; the tests differ in arrays alone.
jitted_values = jax.jit(values, static_argnums=0)
TOKENS = np.random.default_rng(0).integers(0, 30, (2, 6))
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
SEGMENTS = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 2]])


def test_a_fresh_head_says_zero_in_float32():
    head = init_value_head(CONFIG, jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, head) == {"value": {"kernel": (CONFIG.model_dim, 1), "bias": (1,)}}
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    got = values(CONFIG, low, head, TOKENS, POSITIONS, SEGMENTS)
    assert got.shape == (2, 6) and got.dtype == jnp.float32 and not np.any(got)


def test_the_head_learns_a_constant_and_tells_tokens_apart():
    head = init_value_head(CONFIG, jax.random.key(0))
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(head, state, target):
        def loss(head):
            return jnp.mean((values(CONFIG, PARAMS, head, TOKENS, POSITIONS, SEGMENTS) - target) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(head), state)
        return optax.apply_updates(head, updates), state

    for target in (np.full((2, 6), 0.7, np.float32), np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)):
        learned, state = head, optimizer.init(head)
        for _ in range(300):
            learned, state = step(learned, state, target)
        np.testing.assert_allclose(
            jitted_values(CONFIG, PARAMS, learned, TOKENS, POSITIONS, SEGMENTS), target, atol=0.05
        )


def test_a_value_sees_no_later_token_and_no_other_trajectory():
    head = {"value": {"kernel": jnp.ones((CONFIG.model_dim, 1)), "bias": jnp.zeros(1)}}
    changed = TOKENS.copy()
    changed[0, 2], changed[1, 0] = (changed[0, 2] + 1) % 30, (changed[1, 0] + 1) % 30
    got = jitted_values(CONFIG, PARAMS, head, changed, POSITIONS, SEGMENTS)
    want = jitted_values(CONFIG, PARAMS, head, TOKENS, POSITIONS, SEGMENTS)
    same = np.isclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(same, [[1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]])
