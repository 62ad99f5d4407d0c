"""Sampling: frequencies, the nucleus, and the log-probability of what was sampled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.ops.sampling import invert_cumulative, processed_log_probs, sample

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def loop(logits, temperature, top_p):
    """Probabilities by sorting and adding up, one token after the other."""
    probs = np.exp(logits.astype(float) / temperature)
    probs /= probs.sum()
    kept, mass = np.zeros(len(probs), bool), 0.0
    for token in np.argsort(-probs, kind="stable"):
        if mass >= top_p:
            break
        kept[token], mass = True, mass + probs[token]
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.62, 0.9, 1.0])
def test_processed_log_probs_are_the_loop(temperature, top_p):
    logits = np.stack([LOGITS, np.random.default_rng(0).normal(size=5).astype(np.float32)])
    got = np.exp(processed_log_probs(logits, temperature=temperature, top_p=top_p))
    np.testing.assert_allclose(got, [loop(row, temperature, top_p) for row in logits], atol=1e-6)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    # By mass: 0.4, 0.65, 0.85, 0.95, 1.
    inside = np.isfinite(processed_log_probs(LOGITS, temperature=1.0, top_p=0.66))
    np.testing.assert_array_equal(inside, [False, True, False, True, True])
    only = processed_log_probs(LOGITS, temperature=1.0, top_p=0.39)
    np.testing.assert_array_equal(only, [-np.inf, 0.0, -np.inf, -np.inf, -np.inf])


def test_a_kept_token_stays_in_the_nucleus():
    got = processed_log_probs(np.stack([LOGITS, LOGITS]), temperature=1.0, top_p=0.5, keep=jnp.array([2, 1]))
    np.testing.assert_allclose(np.exp(got[0]), np.array([0, 0.4, 0.05, 0.25, 0]) / 0.7, atol=1e-6)
    np.testing.assert_allclose(np.exp(got[1]), np.array([0, 0.4, 0, 0.25, 0]) / 0.65, atol=1e-6)


def test_gradients_stay_finite_outside_the_nucleus():
    grad = jax.grad(lambda x: processed_log_probs(x, temperature=0.6, top_p=0.5)[1])(LOGITS)
    probs = loop(LOGITS, 0.6, 0.5)
    np.testing.assert_allclose(grad, (np.array([0, 1, 0, 0, 0]) - probs) / 0.6, atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.9), (1.3, 0.6)])
def test_frequencies_and_log_probabilities_are_those_of_the_distribution(temperature, top_p):
    n = 20_000
    keys = jax.random.split(jax.random.key(0), n)
    draw = jax.jit(functools.partial(sample, temperature=temperature, top_p=top_p))
    tokens, log_probs = draw(keys, jnp.broadcast_to(LOGITS, (n, 5)))
    want = loop(LOGITS, temperature, top_p)
    share = np.bincount(tokens, minlength=5) / n
    # Five standard errors: one false alarm in a million.
    assert np.all(np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / n))
    np.testing.assert_allclose(np.exp(log_probs), want[np.asarray(tokens)], rtol=1e-5)


def test_temperature_zero_is_greedy_with_the_log_probability_of_one():
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, log_probs = sample(keys, jnp.stack([LOGITS, LOGITS[::-1], LOGITS]), temperature=0.0, top_p=1.0)
    np.testing.assert_array_equal(tokens, [1, 3, 1])
    np.testing.assert_allclose(np.exp(log_probs), 0.4, rtol=1e-5)


def test_a_row_draws_by_its_key_alone():
    keys = jax.random.split(jax.random.key(3), 4)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 50)), jnp.float32)
    tokens, _ = sample(keys, logits, temperature=1.0, top_p=1.0)
    again, _ = sample(keys[::-1], logits[::-1], temperature=1.0, top_p=1.0)
    np.testing.assert_array_equal(tokens, again[::-1])


def test_the_ends_of_the_unit_interval_draw_tokens_of_positive_mass():
    log_probs = jnp.log(jnp.array([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3))
    last = 1 - 2.0**-23
    np.testing.assert_array_equal(invert_cumulative(log_probs, jnp.array([0.0, 0.5, last])), [1, 3, 3])


def test_rounded_sums_never_leave_the_nucleus():
    logits = np.random.default_rng(0).normal(size=(16, 2048)).astype(np.float32) * 2
    log_probs = processed_log_probs(logits, temperature=1.0, top_p=0.9)
    cumulative = np.asarray(jnp.cumsum(jnp.exp(log_probs), axis=-1))
    outside = np.isneginf(log_probs)
    before = np.maximum.accumulate(np.pad(cumulative, ((0, 0), (1, 0)))[:, :-1], axis=1)
    rises = outside & (cumulative > before)
    assert rises.any(), "the sum rounds otherwise here; the test needs another row"
    draw = jax.jit(invert_cumulative)
    for b, v in np.argwhere(rises):
        # The uniform number that falls into the rise.
        uniform = jnp.asarray(before[b, v] / cumulative[b].max())
        around = jnp.stack([jnp.nextafter(uniform, 0.0), uniform, jnp.nextafter(uniform, 1.0)])
        tokens = draw(jnp.broadcast_to(log_probs[b], (3, 2048)), around)
        assert not outside[b, np.asarray(tokens)].any()
