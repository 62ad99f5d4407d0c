"""Behaviour cloning's data: a stream that is a function of the seed and two numbers."""

import re
from dataclasses import replace

import numpy as np
import pytest

from searchrl_jax.config.schema import WarmupConfig
from searchrl_jax.env import Limits
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstrator
from searchrl_jax.rollout.batch import Rows, RowShape, Sample
from searchrl_jax.testing.tiny import tiny_dialect, tiny_documents, tiny_env, tiny_tasks
from searchrl_jax.text.hermes import Call
from searchrl_jax.train.warmup import DemonstrationStream, Scrambler, make_warmup_optimizer, shares_of, warn_of_limits

DIALECT = tiny_dialect()
LIMITS = Limits(max_turns=4, max_tokens_per_turn=40, max_tokens_per_episode=400)
SHARES = {GOOD: 0.4, LAZY: 0.3, RAMBLING: 0.15, OVERLONG: 0.15}
SHAPES = (RowShape(rows=2, length=400, actions=60), RowShape(rows=1, length=400, actions=160))
TASKS = tiny_tasks()[:12]


def stream(
    seed: int = 3, copy_steps: int = 0, scrambled: float = 0.0, slips: float = 0.0, keep_observations: int = 0
) -> DemonstrationStream:
    demonstrator = Demonstrator(
        tiny_env(DIALECT, LIMITS, keep_observations=keep_observations),
        DIALECT,
        tiny_documents(),
        SHARES,
        slips=slips,
    )
    return DemonstrationStream(demonstrator, TASKS, seed, SHAPES, copy_steps=copy_steps, scrambled=scrambled)


def assert_same(a: Rows, b: Rows) -> None:
    for name in ("token_ids", "positions", "segment_ids", "target", "is_action", "behavior_logprob", "advantage"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def style_of(sample: Sample) -> str:
    """How the episode ended, read off its tokens."""
    ids = sample.token_ids[sample.is_action].tolist()
    if ids[-1] != DIALECT.stop_id:
        return OVERLONG
    begin = len(ids) - 1 - ids[::-1].index(DIALECT.tokenizer.control_ids["<tool_call>"])
    last = DIALECT.parse(ids[begin:])
    assert isinstance(last, Call)
    return RAMBLING if last.name != "submit" else LAZY if ids.count(DIALECT.stop_id) == 2 else GOOD


def turns_of(rows: Rows) -> list[list[int]]:
    """The marked tokens of a micro-batch, in runs without a gap."""
    runs = []
    for b in range(len(rows.target)):
        targets = np.asarray(rows.target[b])[np.asarray(rows.is_action[b])]
        for run in np.split(targets, np.flatnonzero(np.diff(targets) != 1) + 1):
            if len(run):
                runs.append(np.asarray(rows.token_ids[b])[run].tolist())
    return runs


def warning(**limits: int) -> str:
    env = tiny_env(DIALECT, replace(LIMITS, **limits))
    return warn_of_limits(Demonstrator(env, DIALECT, tiny_documents(), SHARES), TASKS, 3)


def test_limits_that_good_demonstrations_do_not_keep_are_named() -> None:
    assert warning() == ""  # those styles that are meant to fail don't count
    assert re.fullmatch(
        r"\d+ of \d+ good demonstrations fail at a limit \(context_limit \d+\); raise env.max_tokens_per_episode",
        warning(max_tokens_per_episode=150),
    )
    assert "sampling.sampling_max_tokens" in warning(max_tokens_per_turn=8)


@pytest.mark.parametrize("scrambled", [0.0, 0.5])
def test_compressed_demonstrations_hold_every_action_once_and_go_in_as_a_whole(scrambled: float) -> None:
    source = stream(keep_observations=1, scrambled=scrambled)
    found = sum(int(rows.is_action.sum()) for update in range(1, 13) for rows in source.batch(update))
    parts = [stream(keep_observations=1, scrambled=scrambled).demonstration(n) for n in range(source.next)]
    assert found == sum(int(sample.is_action.sum()) for rows in parts for sample in rows)
    assert max(map(len, parts)) > 2
    plain, compressed = stream(), stream(keep_observations=1)
    for n in range(20):
        (whole,), rows = plain.demonstration(n), compressed.demonstration(n)
        # What fills an overlong turn follows from the tokens before it, and links are copied from what can be read.
        if style_of(whole) in (LAZY, RAMBLING):
            actions = np.concatenate([sample.token_ids[sample.is_action] for sample in rows])
            np.testing.assert_array_equal(actions, whole.token_ids[whole.is_action])


@pytest.mark.parametrize("scrambled", [0.0, 0.5])
def test_a_demonstration_is_a_function_of_seed_and_number(scrambled: float) -> None:
    one, other = stream(scrambled=scrambled), stream(scrambled=scrambled)
    for n in (5, 0, 17):
        np.testing.assert_array_equal(one.demonstration(n)[0].token_ids, other.demonstration(n)[0].token_ids)
    texts = {tuple(one.demonstration(n)[0].token_ids.tolist()) for n in range(20)}
    assert len(texts) > 10
    assert texts != {tuple(stream(4, scrambled=scrambled).demonstration(n)[0].token_ids.tolist()) for n in range(20)}


def test_batches_go_on_from_the_update_and_the_number_of_the_next_demonstration() -> None:
    whole = stream(copy_steps=2)
    batches = [whole.batch(update) for update in range(1, 6)]
    first = stream(copy_steps=2)
    for update in (1, 2, 3):
        first.batch(update)
    resumed = stream(copy_steps=2)
    resumed.next = first.next
    for update in (4, 5):
        for rows, other in zip(resumed.batch(update), batches[update - 1], strict=True):
            assert_same(rows, other)
    assert resumed.next == whole.next > first.next > 0


def test_a_row_of_slips_alone_is_left_out() -> None:
    """It ended a warm-up with compressed histories."""
    source = stream(keep_observations=1, slips=1.0)
    parts = [source.demonstration(n) for n in range(60)]
    assert all(sample.is_action.any() for part in parts for sample in part) and all(parts)


def test_only_training_tasks_are_shown() -> None:
    prompts = {tuple(DIALECT.render_prompt(task.query)) for task in TASKS}
    for n in range(60):
        sample = stream().demonstration(n)[0]
        assert tuple(sample.token_ids[: sample.is_action.argmax()].tolist()) in prompts


def test_failures_come_in_the_stated_shares_whatever_the_question() -> None:
    source, kinds = stream(), {tuple(DIALECT.render_prompt(task.query)): task.metadata["slice"] for task in TASKS}
    samples = [source.demonstration(n)[0] for n in range(300)]
    styles = np.array([style_of(sample) for sample in samples])
    # A good demonstration may need one search only: it then reads like a lazy one.
    for style in (RAMBLING, OVERLONG):
        share = SHARES[style]
        assert abs(np.mean(styles == style) - share) < 4 * np.sqrt(share * (1 - share) / 300), style
    is_failure = (styles == RAMBLING) | (styles == OVERLONG)
    kind = np.array([kinds[tuple(s.token_ids[: s.is_action.argmax()].tolist())] for s in samples])
    assert abs(is_failure[kind == "bridge"].mean() - is_failure[kind == "known_item"].mean()) < 0.2


def test_what_is_marked_reads_back_as_the_calls_and_none_is_lost() -> None:
    source = stream()
    turns = [turn for update in range(1, 13) for rows in source.batch(update) for turn in turns_of(rows)]
    for ids in turns:
        if ids[-1] == DIALECT.stop_id:
            assert isinstance(DIALECT.parse(ids), Call)
        else:  # the overlong ones
            assert len(ids) == LIMITS.max_tokens_per_turn
    demonstrations = [stream().demonstration(n)[0] for n in range(source.next)]
    assert sum(map(len, turns)) == sum(int(d.is_action.sum()) for d in demonstrations)
    assert sum(ids[-1] != DIALECT.stop_id for ids in turns) == sum(style_of(d) == OVERLONG for d in demonstrations)


def test_a_demonstration_with_many_actions_gets_a_shape_of_its_own() -> None:
    source = stream()
    found = {(*rows.token_ids.shape, rows.target.shape[1]) for update in range(1, 13) for rows in source.batch(update)}
    assert found == {(shape.rows, shape.length, shape.actions) for shape in SHAPES}


def test_demonstrations_that_all_need_the_larger_shape_make_batches_too() -> None:
    shapes = (RowShape(rows=2, length=400, actions=4), SHAPES[1])
    demonstrator = Demonstrator(tiny_env(DIALECT, LIMITS), DIALECT, tiny_documents(), {GOOD: 1.0})
    of_large_ones = DemonstrationStream(demonstrator, TASKS, 0, shapes, copy_steps=0, scrambled=0.0)
    batch = of_large_ones.batch(1)
    assert of_large_ones.next == 2 and sum(int(rows.is_action.sum()) for rows in batch) > 8


def test_copying_asks_for_the_repetition_and_nothing_else() -> None:
    source = stream(copy_steps=1)
    (rows,) = source.batch(1)
    assert source.next == 0
    for b in range(SHAPES[0].rows):
        ids, segments = np.asarray(rows.token_ids[b]), np.asarray(rows.segment_ids[b])
        expected = []
        for segment in range(1, segments.max() + 1):
            where = np.flatnonzero(segments == segment)
            half = len(where) // 2
            np.testing.assert_array_equal(ids[where[:half]], ids[where[half:]])
            expected += where[half + 1 :].tolist()
        assert np.asarray(rows.target[b])[np.asarray(rows.is_action[b])].tolist() == expected


def test_scrambling_renames_words_alike_and_leaves_the_rest() -> None:
    tokenizer = DIALECT.tokenizer
    ids = stream().demonstration(0)[0].token_ids
    scrambled = Scrambler(tokenizer)(ids, np.random.default_rng(0))
    assert (scrambled != ids).any()
    # One to one, so that what was a repetition is one still.
    assert len(set(zip(ids.tolist(), scrambled.tolist(), strict=True))) == len(set(ids.tolist())) == len(set(scrambled))
    for before, after in zip(ids.tolist(), scrambled.tolist(), strict=True):
        one, other = tokenizer.decode([before]), tokenizer.decode([after])
        is_syntax = before in {*tokenizer.control_ids.values(), *tokenizer.scaffold_ids.values()}
        if is_syntax or not one.strip() or not one.isprintable() or any(map(str.isdigit, one)):
            assert after == before
        assert one.startswith(" ") == other.startswith(" ")
        assert any(map(str.isalpha, one)) == any(map(str.isalpha, other))


def test_scrambling_writes_no_part_of_a_character() -> None:
    tokenizer = DIALECT.tokenizer
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    is_part = np.array(["\ufffd" in tokenizer.decode([id_]) for id_ in ids])
    assert is_part.sum() >= 128
    for seed in range(5):
        scrambled = Scrambler(tokenizer)(ids, np.random.default_rng(seed))
        np.testing.assert_array_equal(scrambled[is_part], ids[is_part])


def test_scrambling_keeps_what_is_asked_and_what_lines_are_laid_out_with() -> None:
    source = stream(scrambled=1.0)
    known, bridge = (DIALECT.tokenizer.encode(text) for text in (" says how to", " point to"))
    layout = [DIALECT.tokenizer.encode(text) for text in ("\n[1]", " See 1:", " +", "\norder:")]
    for n in range(20):
        (scrambled,), (plain,) = source.demonstration(n), stream().demonstration(n)
        ids, clean = scrambled.token_ids.tolist(), plain.token_ids.tolist()
        assert ids != clean
        for frame in (known, bridge, *layout):
            starts = [i for i in range(len(clean)) if clean[i : i + len(frame)] == frame]
            assert all(ids[i : i + len(frame)] == frame for i in starts)


def test_what_is_not_named_is_good() -> None:
    shares = shares_of(WarmupConfig(lazy=0.5, rambling=0.125, overlong=0.25))
    assert shares == {GOOD: 0.125, LAZY: 0.5, RAMBLING: 0.125, OVERLONG: 0.25}


@pytest.mark.parametrize("steps", [1, 2, 8, 1200])
def test_optimizer_exists_for_any_length(steps: int) -> None:
    params = {"w": np.ones(3, np.float32)}
    optimizer = make_warmup_optimizer(WarmupConfig(steps=steps))
    updates, _ = optimizer.update({"w": np.ones(3, np.float32)}, optimizer.init(params), params)
    assert np.isfinite(updates["w"]).all()
