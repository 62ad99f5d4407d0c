"""The slot engine: what it samples, whatever the slots, the company and the history of a slot."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from searchrl_jax.core.random import token_key
from searchrl_jax.models.config import Delta, Layer
from searchrl_jax.models.decoder import forward, unembed
from searchrl_jax.ops.sampling import processed_log_probs, sample
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes, smallest_fitting
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

V, STOP = 40, 3
CONFIG = tiny_decoder_config(V)
HYBRID = replace(
    CONFIG, conv_width=0, pattern=(Layer("delta"), Layer(window=9)), delta=Delta(2, 4, 6, 10, 4), rotary_dim=4
)
PARAMS = tiny_params(CONFIG, 0)
OTHER = tiny_params(CONFIG, 5)
RUN = jax.random.key(9)
PROMPTS = {7: [5, 6, 7, 8, 9], 8: [10, 11], 9: [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]}


def make(slots, config=CONFIG):
    return Engine(config, Shapes(slots, 48, 4, (slots,), (6,), (64,)), (STOP,), RUN)


@pytest.fixture(scope="module")
def engine():
    return make(3)


@functools.partial(jax.jit, static_argnums=1)
def full_forward(tokens, temperature):
    positions = np.broadcast_to(np.arange(64), tokens.shape)
    logits = unembed(CONFIG, PARAMS, forward(CONFIG, PARAMS, tokens, positions, np.ones(tokens.shape, np.int32)))
    return logits, processed_log_probs(logits, temperature=temperature, top_p=1.0)


def play(engine, slots, uids, tokens=10, params=PARAMS, sampling=Sampling()):  # noqa: B008 (frozen)
    """Ids and log-probabilities of `tokens` tokens at most after each prompt."""
    for slot, uid in zip(slots, uids, strict=True):
        engine.start(slot, uid, PROMPTS[uid])
    log_probs = {uid: [] for uid in uids}
    left = np.zeros(engine.shapes.slots, np.int32)
    left[list(slots)] = tokens
    while left.any():
        engine.flush(params)
        chunk = engine.decode(params, left, sampling)
        for slot, uid in zip(slots, uids, strict=True):
            n = chunk.count[slot]
            log_probs[uid] += chunk.logprobs[slot, :n].tolist()
            left[slot] -= n
            if n and engine.ids[slot][-1] == STOP:
                left[slot] = 0
    ids = {uid: list(engine.ids[slot]) for slot, uid in zip(slots, uids, strict=True)}
    for slot in slots:
        engine.release(slot)
    return ids, log_probs


def test_tokens_and_log_probabilities_are_those_of_the_full_forward(engine):
    ids, log_probs = play(engine, (2, 0, 1), (7, 8, 9), sampling=Sampling(0.6))
    for uid, sequence in ids.items():
        row = np.zeros((1, 64), np.int32)
        row[0, : len(sequence)] = sequence
        logits, want = full_forward(row, 0.6)
        begin = len(PROMPTS[uid])
        assert sequence[:begin] == PROMPTS[uid] and len(sequence) > begin
        for position in range(begin, len(sequence)):
            token, _ = sample(token_key(RUN, uid, position)[None], logits[:, position - 1], temperature=0.6, top_p=1.0)
            assert int(token[0]) == sequence[position]
            got = log_probs[uid][position - begin]
            assert got == pytest.approx(float(want[0, position - 1, sequence[position]]), abs=1e-4)


def test_any_of_several_stop_ids_ends_a_turn(engine):
    ids, _ = play(engine, (0,), (9,))
    begin = len(PROMPTS[9])
    other = ids[9][begin + 1]
    several = Engine(CONFIG, engine.shapes, (STOP, other), RUN)
    several.start(0, 9, PROMPTS[9])
    several.flush(PARAMS)
    chunk = several.decode(PARAMS, np.array([4, 0, 0]), Sampling())
    assert ids[9][begin:].index(other) + 1 == chunk.count[0] < 4
    assert several.ids[0] == ids[9][: begin + int(chunk.count[0])]


def test_company_slots_and_former_occupants_change_nothing(engine):
    alone, _ = play(engine, (1,), (8,))
    play(engine, (0, 1, 2), (9, 7, 8), params=OTHER)
    together, _ = play(engine, (2, 1, 0), (7, 8, 9))
    again, _ = play(engine, (0, 1, 2), (9, 7, 8))
    assert together[8] == again[8] == alone[8] and together == {uid: again[uid] for uid in together}
    wide, _ = play(make(5), (4, 2, 3), (7, 8, 9))
    assert wide == together


@pytest.mark.slow
def test_a_recurrent_state_is_its_slot_s_own_and_never_stale():
    config = HYBRID
    params, other = (tiny_params(config, seed) for seed in (0, 5))
    engine = make(3, config)
    play(engine, (0, 1, 2), (9, 7, 8), params=other)
    ids, log_probs = play(engine, (2, 1, 0), (7, 8, 9), params=params)
    tokens = np.zeros((3, 24), np.int32)
    for row, sequence in enumerate(ids.values()):
        tokens[row, : len(sequence)] = sequence
    positions = np.broadcast_to(np.arange(24), tokens.shape)
    full = jax.jit(lambda p: unembed(config, p, forward(config, p, tokens, positions, np.ones_like(tokens))))
    want = np.asarray(jax.nn.log_softmax(full(params)))
    for row, (uid, sequence) in enumerate(ids.items()):
        at = np.arange(len(PROMPTS[uid]), len(sequence))
        np.testing.assert_allclose(log_probs[uid], want[row, at - 1, np.array(sequence)[at]], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "computed"),
    # Attention alone: one prompt, and the little that others add to the system's words, for which nobody waits.
    # Whatever has a state of its own shares whole prompts: one takes the shorter, and adds 4. One begins like none.
    [
        (replace(CONFIG, conv_width=0), 25 + 5 + 5 + 1 + 2),
        (CONFIG, 25 + 25 + 21 + 4 + 2),
        (HYBRID, 25 + 25 + 21 + 4 + 2),
    ],
    ids=["attention", "convolution", "delta"],
)
def test_what_slots_begin_with_is_computed_once(config, computed, monkeypatch):
    params = tiny_params(config, 0)
    system = list(range(4, 24))
    prompts = {
        1: [*system, 30, 31, 32, 33, 34, 35],
        2: [*system, 30, 31, 32, 33, 34, 35],
        3: [*system, 25, 26, 27, 28, 29, 36],
        4: [*system, 25, 26, 27, 28, 29, 36],
        5: [*system, 25, 26],
        6: [9, 8, 7],
    }
    monkeypatch.setattr("test_engine.PROMPTS", PROMPTS | prompts)
    order, uids = (5, 0, 3, 1, 4, 2), tuple(prompts)
    fed = []

    def record(engine):
        append = engine._append

        def recorded(params, cache, tokens, num_new, slots, **options):
            fed.append(int(num_new.sum()))
            return append(params, cache, tokens, num_new, slots, **options)

        engine._append = recorded
        return engine

    # With other weights first, whose rows must not be taken for anybody's beginning.
    engine = make(6, config)
    play(engine, order, uids, params=tiny_params(config, 5))
    ids, log_probs = play(record(engine), order, uids, tokens=4, params=params)
    assert sum(fed) == computed
    monkeypatch.setattr("searchrl_jax.rollout.engine.SHARED_AT_LEAST", 10**6)
    fed.clear()
    alone, want = play(record(make(6, config)), order, uids, tokens=4, params=params)
    assert sum(fed) == sum(len(prompt) - 1 for prompt in prompts.values())
    assert ids == alone
    for uid in uids:
        np.testing.assert_allclose(log_probs[uid], want[uid], atol=1e-5)


def test_slots_that_begin_alike_are_computed_anew_with_new_weights_and_after_they_were_set_aside():
    config = replace(CONFIG, conv_width=0)
    old, new = tiny_params(config, 5), tiny_params(config, 0)
    prompt = list(range(4, 24))
    log_probs = []
    for change in (lambda engine: None, Engine.forget, lambda engine: engine.put_back(engine.set_aside())):
        engine = make(2, config)
        for slot in (0, 1):
            engine.start(slot, slot, prompt)
        engine.flush(old if change is Engine.forget else new)
        change(engine)
        engine.flush(new)
        log_probs.append(engine.decode(new, np.array([4, 4]), Sampling()).logprobs)
    np.testing.assert_allclose(log_probs[1], log_probs[0], atol=1e-5)
    np.testing.assert_allclose(log_probs[2], log_probs[0], atol=1e-5)


def test_the_engine_s_own_shapes_sample_what_one_shape_does():
    """Several buckets of keys, one below what a ring holds and one above, and appends of few rows and of many."""
    config = replace(CONFIG, conv_width=0, pattern=(Layer(window=150), Layer()))
    params, shapes = tiny_params(config, 0), Shapes.choose(8, 420, 4, 30)
    assert shapes.append_rows == (1, 2, 4, 8) and shapes.append_tokens == (32,)
    assert shapes.key_buckets == (256, 384, shapes.cache_length) and shapes.cache_length == 452
    found = []
    for each in (shapes, replace(shapes, append_rows=(8,), key_buckets=(452,))):
        engine = Engine(config, each, (STOP,), RUN)
        assert engine.cache.is_ring == (True, False)
        rng, log_probs = np.random.default_rng(0), []
        for slot, length in enumerate((3, 60, 200, 250, 255, 300, 380)):
            engine.start(slot, slot, rng.integers(4, V, length).tolist())
        for _ in range(3):
            engine.flush(params)
            chunk = engine.decode(params, np.array([4] * 7 + [0]), Sampling())
            log_probs.append(chunk.logprobs)
            for slot in range(7):
                engine.extend(slot, rng.integers(4, V, 5).tolist())
        found.append((engine.ids, np.stack(log_probs)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)


def test_new_weights_leave_nothing_of_the_old_in_the_cache(engine):
    fresh = play(make(3), (0,), (9,), params=OTHER)
    play(engine, (0,), (9,), params=PARAMS)
    assert play(engine, (0,), (9,), params=OTHER) == fresh


def test_slots_that_were_set_aside_go_on_as_if_nothing_had_happened(engine):
    undisturbed, log_probs = play(make(3), (0, 1), (7, 9))
    engine.start(0, 7, PROMPTS[7])
    engine.start(1, 9, PROMPTS[9], offset=40)
    engine.flush(PARAMS)
    budget = np.array([10, 10, 0])
    first = engine.decode(PARAMS, budget, Sampling())
    aside = engine.set_aside()
    assert engine.ids == [[], [], []]
    play(engine, (0, 1, 2), (8, 7, 9), params=OTHER)
    engine.put_back(aside)
    assert engine.offsets.tolist()[:2] == [0, 40], "or random keys would come twice"
    assert engine.held.tolist() == [0, 0, 0] and not engine.cache.length.any() and not engine.cache.conv[0].any()
    found = first.logprobs[0, : first.count[0]].tolist()
    budget[:2] -= first.count[:2]
    while budget[0] and engine.ids[0][-1] != STOP:
        engine.flush(PARAMS)
        chunk = engine.decode(PARAMS, budget, Sampling())
        found += chunk.logprobs[0, : chunk.count[0]].tolist()
        budget -= chunk.count
    assert engine.ids[0] == undisturbed[7]
    np.testing.assert_allclose(found, log_probs[7], atol=1e-4)
    for slot in (0, 1):
        engine.release(slot)


def test_appended_ids_are_kept_as_they_are(engine):
    engine.start(0, 7, PROMPTS[7])
    engine.flush(PARAMS)
    chunk = engine.decode(PARAMS, np.array([3, 0, 0]), Sampling())
    sampled = chunk.tokens[0, : chunk.count[0]].tolist()
    engine.extend(0, [30, 31, 32, 33, 34, 35, 36, 37])
    engine.flush(PARAMS)
    assert engine.ids[0] == [*PROMPTS[7], *sampled, 30, 31, 32, 33, 34, 35, 36, 37]
    assert engine.held[0] == engine.cache.length[0] == len(engine.ids[0]) - 1
    # What is sampled next is what a slot gives that was handed the same ids at once.
    engine.start(1, 7, engine.ids[0])
    engine.flush(PARAMS)
    after = engine.decode(PARAMS, np.array([4, 4, 0]), Sampling())
    assert after.tokens[0].tolist() == after.tokens[1].tolist()
    np.testing.assert_allclose(after.logprobs[0], after.logprobs[1], atol=1e-4)
    engine.release(0)
    engine.release(1)


def test_a_budget_is_kept_to_and_the_rest_stays(engine):
    engine.start(0, 7, PROMPTS[7])
    engine.start(1, 8, PROMPTS[8])
    engine.flush(PARAMS)
    before = list(engine.ids[1])
    chunk = engine.decode(PARAMS, np.array([2, 0, 0]), Sampling())
    assert chunk.count[0] <= 2 and chunk.count[1] == chunk.count[2] == 0 and engine.ids[1] == before
    engine.release(0)
    engine.release(1)


def test_released_slots_hold_nothing(engine):
    play(engine, (0, 1, 2), (7, 8, 9))
    assert engine.ids == [[], [], []]


def test_sizes_that_do_not_fit_are_refused(engine):
    assert smallest_fitting((4, 16), 5) == 16
    with pytest.raises(ValueError, match="at most 16, got 17"):
        smallest_fitting((4, 16), 17)
    with pytest.raises(ValueError, match="at least one prompt token"):
        engine.start(0, 1, [])
