"""The mixture of experts against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.ops.experts import choose, mix_experts

RNG = np.random.default_rng(0)
X = RNG.normal(size=(9, 5)).astype(np.float32)
LOGITS = RNG.normal(size=(9, 4)).astype(np.float32)
W, BIAS = RNG.normal(size=(4, 5, 5)).astype(np.float32), RNG.normal(size=(4, 5)).astype(np.float32)


def mixed(x, w, logits=LOGITS):
    weights, index = choose(logits, 2)
    return mix_experts(
        x, weights, index, 4, lambda rows, sizes, of_row: jnp.tanh(jax.lax.ragged_dot(rows, w, sizes) + BIAS[of_row])
    )


def test_the_mixture_is_the_loop():
    got = mixed(X, W)
    for m in range(9):
        best = np.argsort(-LOGITS[m])[:2]
        weights = np.exp(LOGITS[m, best]) / np.exp(LOGITS[m, best]).sum()
        want = sum(p * np.tanh(X[m] @ W[e] + BIAS[e]) for p, e in zip(weights, best, strict=True))
        np.testing.assert_allclose(got[m], want, atol=1e-5)


def test_weights_are_the_softmax_over_all_renormalised_over_the_chosen():
    weights, index = choose(LOGITS, 2)
    of_all = np.take_along_axis(np.array(jax.nn.softmax(LOGITS)), np.array(index), axis=1)
    np.testing.assert_allclose(weights, of_all / of_all.sum(axis=1, keepdims=True), rtol=1e-5)


def test_an_expert_that_nobody_chose_gets_no_gradient_and_all_tokens_may_choose_one():
    logits = np.tile(np.array([3.0, 2.0, -9.0, -9.0], np.float32), (9, 1))
    grad = jax.grad(lambda w: jnp.sum(jnp.sin(mixed(X, w, logits))))(W)
    assert np.abs(grad[:2]).max() > 0 and not np.any(grad[2:])
