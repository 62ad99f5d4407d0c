"""The decoder: cached equals full, packed equals unpacked, padding is nothing."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.models.cache import init_cache, init_stage, rows_of, staged_entries, write_rows
from searchrl_jax.models.config import DecoderConfig, Delta, Layer
from searchrl_jax.models.decoder import append, decode_step, forward, init_params, unembed
from searchrl_jax.ops.convolution import causal_convolution
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

V, L = 50, 24
CONFIG = tiny_decoder_config(V)
PARAMS = tiny_params(CONFIG, 0)
TOKENS = np.random.default_rng(0).integers(0, V, (3, L))


@functools.partial(jax.jit, static_argnums=0)
def full_logits(config, params, tokens, positions, segment_ids):
    return unembed(config, params, forward(config, params, tokens, positions, segment_ids))


# All tests share the shapes of these: 3 rows of 32 cached tokens, 6 to append, 4 to decode.
@functools.partial(jax.jit, static_argnums=0)
def jitted_append(config, params, cache, tokens, num_new):
    hidden, entries = append(config, params, cache, tokens, num_new)
    return unembed(config, params, hidden), entries


jitted_step = jax.jit(decode_step, static_argnums=0)
jitted_write = jax.jit(write_rows)


def plain(tokens, config=CONFIG, params=PARAMS):
    """Logits of rows that hold one sequence each."""
    rows, length = tokens.shape
    positions = np.broadcast_to(np.arange(length), (rows, length))
    return np.asarray(full_logits(config, params, tokens, positions, np.ones((rows, length), np.int32)))


def decode(config, params, cache, fed, num_fed):
    """Logits [steps, B, V] of feeding `fed` [B, steps] one by one, and the cache that keeps `num_fed` of each row."""
    steps, num_fed = fed.shape[1], jnp.asarray(num_fed)
    stage, logits = init_stage(cache, steps), []
    for i in range(steps):
        out, stage = jitted_step(config, params, cache, stage, jnp.int32(i), fed[:, i], i < num_fed)
        logits.append(out)
    entries = staged_entries(stage, num_fed)
    return np.stack(logits), jitted_write(cache, entries, num_fed, jnp.arange(len(fed)))


@pytest.mark.parametrize(
    ("conv_width", "pattern", "rings"),
    [(4, (Layer(),), 0), (0, (Layer(),), 0), (0, (Layer(window=5),), 1), (4, (Layer(window=3), Layer()), 1)],
)
def test_ragged_appends_and_chunks_equal_the_full_forward(conv_width, pattern, rings):
    """A layer with a window keeps 5 + 6 or 3 + 6 entries of up to 20, and what is written goes around."""
    config = replace(tiny_decoder_config(V, conv_width=conv_width), pattern=pattern)
    params = tiny_params(config, 0)
    want = plain(TOKENS, config, params)
    cache = init_cache(config, 3, 32, piece=6)
    assert sum(cache.is_ring) == rings
    at = np.zeros(3, int)

    def piece(widths, size):
        """The next tokens of each row, and garbage after them."""
        out = np.full((3, size), V - 1)
        for b, n in enumerate(widths):
            out[b, :n] = TOKENS[b, at[b] : at[b] + n]
        return out

    for kind, counts in [
        ("append", [5, 2, 1]),
        ("append", [0, 3, 4]),
        ("decode", [4, 2, 0]),
        ("append", [6, 1, 3]),
        ("decode", [1, 4, 3]),
        ("decode", [4, 0, 4]),
    ]:
        tokens, num = piece(counts, 6 if kind == "append" else 4), np.array(counts)
        if kind == "append":
            got, entries = jitted_append(config, params, cache, tokens, num)
            got = np.asarray(got)
            cache = jitted_write(cache, entries, num, jnp.arange(3))
        else:
            got, cache = decode(config, params, cache, tokens, num)
            got = got.transpose(1, 0, 2)
        for b, n in enumerate(counts):
            np.testing.assert_allclose(got[b, :n], want[b, at[b] : at[b] + n], atol=2e-4)
        at += num
        np.testing.assert_array_equal(cache.length, at)


def test_rows_go_to_their_slots_and_leave_the_others_alone():
    cache, num_new = init_cache(CONFIG, 4, 40), jnp.array([6, 6, 6])
    _, entries = jitted_append(CONFIG, PARAMS, rows_of(cache, jnp.arange(3), 32), TOKENS[:, :6], num_new)
    cache = jitted_write(cache, entries, num_new, jnp.array([3, 0, 2]))
    np.testing.assert_array_equal(cache.length, [6, 0, 6, 6])
    assert not np.any(np.asarray(cache.k[0])[:, 1])
    # Two rows of real work and one of padding, whose slot is one of the two: it must not be touched again.
    slots, num_new = jnp.array([2, 3, 2]), jnp.array([3, 2, 0])
    more = np.stack([TOKENS[2, 6:12], TOKENS[0, 6:12], np.zeros(6, int)])
    got, entries = jitted_append(CONFIG, PARAMS, rows_of(cache, slots, 32), more, num_new)
    after = jitted_write(cache, entries, num_new, slots)
    want = plain(TOKENS)
    np.testing.assert_allclose(got[0, :3], want[2, 6:9], atol=2e-4)
    np.testing.assert_allclose(got[1, :2], want[0, 6:8], atol=2e-4)
    np.testing.assert_array_equal(after.length, [6, 0, 9, 8])
    np.testing.assert_array_equal(after.k[0][:, 0], cache.k[0][:, 0])
    np.testing.assert_array_equal(after.conv[0][:, 2], np.asarray(entries.conv[0])[:, 0])


@pytest.mark.parametrize("poison", [1e6, np.nan])
def test_what_stands_past_a_row_s_length_is_not_read(poison):
    cache, num = init_cache(CONFIG, 3, 32), jnp.array([6, 4, 1])
    _, entries = jitted_append(CONFIG, PARAMS, cache, TOKENS[:, :6], num)
    clean = jitted_write(cache, entries, num, jnp.arange(3))
    past = (np.arange(32)[None] >= np.asarray(num)[:, None])[None, :, None, :, None]
    # A weight of 0 times a NaN value is NaN, so values are poisoned with a large number: a cache holds no NaN unless
    # the parameters do.
    poisoned = clean.replace(k=(jnp.where(past, poison, clean.k[0]),), v=(jnp.where(past, 1e6, clean.v[0]),))
    got = []
    for state in (clean, poisoned):
        appended, _ = jitted_append(CONFIG, PARAMS, state, TOKENS[:, 6:12], jnp.array([6, 6, 6]))
        decoded, _ = decode(CONFIG, PARAMS, state, TOKENS[:, 6:10], np.array([4, 4, 4]))
        got.append((appended, decoded))
    np.testing.assert_array_equal(got[1][0], got[0][0])
    np.testing.assert_array_equal(got[1][1], got[0][1])


def test_the_ids_of_padding_change_nothing():
    segment_ids = np.array([[1] * 10 + [0] * 14, [1] * 24, [1] * 3 + [2] * 9 + [0] * 12])
    positions = np.array([[*range(10), *[0] * 14], [*range(24)], [*range(3), *range(9), *[0] * 12]])
    other = np.where(segment_ids == 0, (TOKENS + 7) % V, TOKENS)
    real = segment_ids > 0
    got = np.asarray(full_logits(CONFIG, PARAMS, other, positions, segment_ids))
    want = np.asarray(full_logits(CONFIG, PARAMS, TOKENS, positions, segment_ids))
    np.testing.assert_array_equal(got[real], want[real])
    assert np.isfinite(want).all()

    def loss(params, tokens):
        logits = full_logits(CONFIG, params, tokens, positions, segment_ids)
        return jnp.sum(jnp.where(real[..., None], jnp.sin(logits), 0))

    grad = jax.jit(jax.grad(loss))
    one, two = grad(PARAMS, TOKENS), grad(PARAMS, other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), one, two)


def test_packed_rows_equal_rows_of_their_own():
    tokens = np.stack([np.concatenate([TOKENS[0, :9], TOKENS[1, :4], TOKENS[2, :11]])] * 3)
    positions = np.array([[*range(9), *range(4), *range(11)]] * 3)
    segment_ids = np.array([[1] * 9 + [2] * 4 + [3] * 11] * 3)
    packed = np.asarray(full_logits(CONFIG, PARAMS, tokens, positions, segment_ids))
    want = plain(TOKENS)
    for row in packed:
        np.testing.assert_allclose(row, np.concatenate([want[0, :9], want[1, :4], want[2, :11]]), atol=2e-4)


def test_a_token_sees_nothing_after_it():
    changed = TOKENS.copy()
    changed[:, 12] = (changed[:, 12] + 1) % V
    got, want = plain(changed), plain(TOKENS)
    np.testing.assert_allclose(got[:, :12], want[:, :12], atol=1e-6)
    assert np.all(np.abs(got[:, 12:] - want[:, 12:]).max(axis=-1) > 1e-4)


def test_the_order_of_rows_is_theirs_alone():
    np.testing.assert_allclose(plain(TOKENS[::-1].copy()), plain(TOKENS)[::-1], atol=1e-5)


def test_a_convolution_of_the_present_alone_is_none_and_a_noisy_one_is_read():
    present = jnp.zeros_like(PARAMS["layers"]["conv_k"]).at[:, 0].set(1.0)
    single = {**PARAMS, "layers": {**PARAMS["layers"], "conv_k": present, "conv_q": present}}
    without = {**PARAMS, "layers": {k: v for k, v in PARAMS["layers"].items() if k not in ("conv_q", "conv_k")}}
    config = tiny_decoder_config(V, conv_width=0)
    np.testing.assert_allclose(plain(TOKENS, CONFIG, single), plain(TOKENS, config, without), atol=1e-5)
    assert np.abs(plain(TOKENS) - plain(TOKENS, CONFIG, single)).max() > 1e-2


def test_of_two_places_with_the_same_last_tokens_the_one_with_the_longer_common_past_scores_higher():
    config = replace(tiny_decoder_config(V, conv_width=12), model_dim=192, num_layers=1)
    layers = init_params(config, jax.random.key(3))["layers"]
    rng = np.random.default_rng(0)
    shorter = longer = 0
    for _ in range(20):
        tokens = rng.normal(size=(300, 192))
        # A phrase of twelve tokens, its last three after others, its last eight after others; then it is sought.
        phrase = list(range(12))
        text = [*range(12, 40), *phrase, *range(40, 60), *phrase[9:], *range(60, 80), *phrase[4:], *range(80, 90)]
        text += phrase
        x = jnp.asarray(tokens[text], jnp.float32)[None]
        past = jnp.zeros((1, 11, 192))
        sought = causal_convolution(x, layers["conv_k"][0], past)[0]
        seeking = causal_convolution(x, layers["conv_q"][0], past)[0, -1]
        scores = np.asarray(sought @ seeking / jnp.linalg.norm(sought, axis=-1))
        after_all, after_three, after_eight = 40, 63, 91  # the places that follow the phrase or its end
        assert scores[:-1].argmax() == after_all
        longer += scores[after_eight] > scores[after_three]
        shorter += scores[after_three] > np.delete(scores[:-1], [after_all, after_eight, after_three]).max()
    assert longer >= 19 and shorter >= 15


def test_logits_of_a_low_precision_decoder_are_float32():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert unembed(CONFIG, low, jnp.ones((2, CONFIG.model_dim), jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_kv_heads", 3, "num_heads: expected a multiple of num_kv_heads \\(3\\), got 4"),
        ("head_dim", 7, "head_dim: expected an even number"),
        ("pattern", (Layer(), Layer()), "num_layers: expected a multiple of the pattern's 2 layers, got 1"),
        ("pattern", (Layer(num_kv_heads=3),), "num_heads: expected a multiple of num_kv_heads \\(3\\), got 4"),
        ("pattern", (Layer("delta"),), 'delta: expected the heads of the "delta" layers'),
        ("delta", Delta(2, 3, 4, 4, 4), "delta.num_value_heads: expected a multiple of num_key_heads \\(2\\), got 3"),
    ],
)
def test_shapes_that_make_no_decoder_are_refused(name, value, says):
    good = dict(vocab_size=9, num_layers=1, model_dim=8, ff_dim=8, num_heads=4, num_kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=says):
        DecoderConfig(**{**good, name: value})
