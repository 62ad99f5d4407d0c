"""Every family equals transformers: packed rows and their gradients, prefill, and cached ragged decoding."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, TOKENS, drawn, names, nested

from searchrl_jax.models.cache import init_cache, init_stage, reset_row, rows_of, staged_entries, write_rows
from searchrl_jax.models.decoder import append, decode_step, forward, unembed

REFERENCES = Path(__file__).with_name("references.npz")
LENGTH, SLOTS, CAPACITY, STEPS = TOKENS.shape[1], 3, 32, 4
PIECE = 7  # so that what layers with a window hold goes around


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def config(family):
    return FAMILIES[family].config


@pytest.fixture(scope="module")
def weights(config):
    return drawn(config, "weights")


@pytest.fixture(scope="module")
def want(family):
    with np.load(REFERENCES) as file:
        return {name.removeprefix(f"{family}:"): file[name] for name in file.files if name.startswith(f"{family}:")}


def assert_close(got, want, scale):
    np.testing.assert_allclose(got, want, atol=2e-4 * scale, rtol=0)


def test_packed_rows_and_their_gradients(config, weights, want):
    tokens = np.concatenate([*TOKENS, [1, 2, 3]])[None]
    positions = np.concatenate([np.arange(LENGTH)] * 2 + [[0, 0, 0]])[None]
    segment_ids = np.repeat([1, 2, 0], [LENGTH, LENGTH, 3])[None]
    is_predicted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    remat = len(config.pattern) > 1  # without where layers are alike, which test_step.py compares

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        logits = unembed(config, params, forward(config, params, tokens, positions, segment_ids, remat=remat))
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(is_predicted, log_probs, 0)) / is_predicted.sum(), logits

    again = str(jax.make_jaxpr(loss)(nested(weights))).count("= remat")
    assert again == (len(config.pattern) if remat else 0)
    (_, logits), grads = loss(nested(weights))
    rows = np.asarray(logits)[0, : 2 * LENGTH].reshape(2, LENGTH, -1)
    assert_close(rows, want["logits"], np.abs(want["logits"]).max())
    grads, direction = names(grads), drawn(config, "direction")
    for path, derivative in zip(sorted(weights), want["derivatives"], strict=True):
        if path.endswith("layer_scale"):
            assert not np.any(grads[path])
            continue
        along = np.sum(np.asarray(grads[path], np.float64) * direction[path])
        assert abs(along - derivative) <= 2e-4 * np.linalg.norm(grads[path]), path


def test_prefill_and_ragged_decoding_in_slots_that_others_used(config, weights, want):
    params, logits = nested(weights), want["logits"]
    scale = np.abs(logits).max()
    cache = init_cache(config, SLOTS, CAPACITY, piece=PIECE)
    trajectory = {0: 1, 1: 1, 2: 0}  # what each slot holds, a row of TOKENS
    at = dict.fromkeys(trajectory, 0)

    @jax.jit
    def appended(cache, tokens, num_new, slots):
        hidden, entries = append(config, params, rows_of(cache, slots, CAPACITY), tokens, num_new)
        return unembed(config, params, hidden), write_rows(cache, entries, num_new, slots)

    step = jax.jit(functools.partial(decode_step, config, params))

    @jax.jit
    def kept(cache, stage, num_fed):
        return write_rows(cache, staged_entries(stage, num_fed), num_fed, jnp.arange(SLOTS))

    def put(cache, counts):
        """Appends the next `counts[slot]` tokens to each slot, and compares."""
        left = dict(counts)
        while any(left.values()):
            num = {slot: min(count, PIECE) for slot, count in left.items()}
            tokens = np.full((2, PIECE), 7)
            for row, (slot, n) in enumerate(num.items()):
                tokens[row, :n] = TOKENS[trajectory[slot], at[slot] : at[slot] + n]
            got, cache = appended(cache, tokens, jnp.array(list(num.values())), jnp.array(list(num)))
            for row, (slot, n) in enumerate(num.items()):
                assert_close(np.asarray(got)[row, :n], logits[trajectory[slot], at[slot] : at[slot] + n], scale)
                at[slot], left[slot] = at[slot] + n, left[slot] - n
        return cache

    def decode(cache, counts):
        """Feeds `counts[slot]` tokens to each slot, one by one, and compares."""
        stage, num_fed = init_stage(cache, STEPS), np.array([counts.get(slot, 0) for slot in range(SLOTS)])
        for i in range(STEPS):
            fed = [TOKENS[trajectory[slot], (at[slot] + i) % LENGTH] for slot in range(SLOTS)]
            got, stage = step(cache, stage, jnp.int32(i), jnp.array(fed), i < num_fed)
            for slot in np.flatnonzero(i < num_fed):
                assert_close(np.asarray(got)[slot], logits[trajectory[slot], at[slot] + i], scale)
        for slot in range(SLOTS):
            at[slot] += num_fed[slot]
        return kept(cache, stage, jnp.array(num_fed))

    # Another trajectory was in both slots before.
    for start in range(0, LENGTH, PIECE):
        other = TOKENS[:, ::-1][:, start : start + PIECE]
        _, cache = appended(cache, other, jnp.array([PIECE, PIECE]), jnp.array([2, 0]))
    for slot in (2, 0):
        cache = reset_row(cache, slot)
    cache = put(cache, {2: 5, 0: 2})
    cache = decode(cache, {2: 2, 0: 4})
    cache = put(cache, {2: 3, 1: LENGTH})
    cache = decode(cache, {2: 4, 0: 4})
    # A row of padding that names a slot in use leaves it alone.
    before = jax.tree.map(lambda x: np.array(x)[:, 1], (cache.conv, cache.state))
    cache = put(cache, {0: 4, 1: 0})
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.array(x)[:, 1], y), (cache.conv, cache.state), before)
    np.testing.assert_array_equal(cache.length, [LENGTH] * SLOTS)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_references_are_what_transformers_makes(family, want):
    pytest.importorskip("torch", reason="the reference runs in torch: make reference")
    from record_references import reference

    found = reference(family)
    assert found.keys() == want.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-3, atol=1e-5)
