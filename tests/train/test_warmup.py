"""Behaviour cloning's data: a stream of demonstrations that is a function of the seed and a number."""

from collections import Counter

import numpy as np
import pytest

from searchrl_jax.config.schema import WarmupConfig
from searchrl_jax.env import Limits
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstrator
from searchrl_jax.rollout.batch import Rows, RowShape
from searchrl_jax.testing.tiny import tiny_dialect, tiny_documents, tiny_env, tiny_tasks
from searchrl_jax.text.hermes import Call
from searchrl_jax.train.warmup import DemonstrationStream, make_warmup_optimizer, shares_of

DIALECT = tiny_dialect()
LIMITS = Limits(max_turns=4, max_tokens_per_turn=40, max_tokens_per_episode=400)
SHARES = {GOOD: 0.4, LAZY: 0.3, RAMBLING: 0.15, OVERLONG: 0.15}
SHAPES = (RowShape(rows=2, length=400, actions=80), RowShape(rows=1, length=400, actions=160))
STATUS = {GOOD: "submitted", LAZY: "submitted", RAMBLING: "turn_limit", OVERLONG: "token_limit"}


def stream(seed: int = 3) -> DemonstrationStream:
    demonstrator = Demonstrator(tiny_env(DIALECT, LIMITS), DIALECT, tiny_documents(), SHARES)
    return DemonstrationStream(demonstrator, tiny_tasks()[:12], seed, SHAPES)


def assert_same(a: Rows, b: Rows) -> None:
    for name in ("token_ids", "positions", "segment_ids", "target", "is_action", "behavior_logprob", "advantage"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_a_demonstration_is_a_function_of_seed_and_number() -> None:
    one, other = stream(), stream()
    for n in (5, 0, 17):
        a, b = one.demonstration(n), other.demonstration(n)
        assert (a.task_id, a.style) == (b.task_id, b.style)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    texts = {tuple(one.demonstration(n).token_ids.tolist()) for n in range(20)}
    assert len(texts) > 10
    assert [stream(4).demonstration(n).task_id for n in range(9)] != [one.demonstration(n).task_id for n in range(9)]


def test_batches_go_on_from_the_number_of_the_next_demonstration() -> None:
    whole = stream()
    batches = [whole.next_batch() for _ in range(5)]
    first = stream()
    for _ in range(3):
        first.next_batch()
    resumed = stream()
    resumed.next = first.next
    for expected in batches[3:]:
        for rows, other in zip(resumed.next_batch(), expected, strict=True):
            assert_same(rows, other)
    assert resumed.next == whole.next


def test_every_demonstration_ends_as_its_style_says_on_training_tasks_only() -> None:
    demonstrations = [stream().demonstration(n) for n in range(60)]
    assert all(d.status == STATUS[d.style] for d in demonstrations)
    assert {d.task_id for d in demonstrations} <= {task.task_id for task in tiny_tasks()[:12]}


def test_shares_over_three_hundred_draws_and_whatever_the_question() -> None:
    source = stream()
    demonstrations = [source.demonstration(n) for n in range(300)]
    counts = Counter(d.style for d in demonstrations)
    for style, share in SHARES.items():  # within four standard deviations
        assert abs(counts[style] / 300 - share) < 4 * np.sqrt(share * (1 - share) / 300), style
    # Known items and bridges meet failures equally often.
    failed = [d.style in (RAMBLING, OVERLONG) for d in demonstrations]
    kinds = np.array([d.task_id.startswith("known") for d in demonstrations])
    rates = [np.mean(np.array(failed)[kinds == kind]) for kind in (True, False)]
    assert abs(rates[0] - rates[1]) < 0.2


def turns_of(rows: Rows) -> list[list[int]]:
    """The marked tokens of a micro-batch, in runs without a gap."""
    runs = []
    for b in range(len(rows.target)):
        targets = np.asarray(rows.target[b])[np.asarray(rows.is_action[b])]
        for run in np.split(targets, np.flatnonzero(np.diff(targets) != 1) + 1):
            if len(run):
                runs.append(np.asarray(rows.token_ids[b])[run].tolist())
    return runs


def test_what_is_marked_reads_back_as_the_calls_and_none_is_lost() -> None:
    source = stream()
    turns = [turn for _ in range(12) for rows in source.next_batch() for turn in turns_of(rows)]
    for ids in turns:
        if ids[-1] == DIALECT.stop_id:
            assert isinstance(DIALECT.parse(ids), Call)
        else:  # the overlong ones
            assert len(ids) == LIMITS.max_tokens_per_turn
    demonstrations = [stream().demonstration(n) for n in range(source.next)]
    assert sum(map(len, turns)) == sum(int(d.is_action.sum()) for d in demonstrations)
    assert sum(ids[-1] != DIALECT.stop_id for ids in turns) == sum(d.style == OVERLONG for d in demonstrations)


def test_a_demonstration_with_many_actions_gets_a_shape_of_its_own() -> None:
    source = stream()
    shapes = {(*rows.token_ids.shape, rows.target.shape[1]) for _ in range(12) for rows in source.next_batch()}
    assert shapes == {(shape.rows, shape.length, shape.actions) for shape in SHAPES}


def test_what_is_not_named_is_good() -> None:
    shares = shares_of(WarmupConfig(lazy=0.5, rambling=0.125, overlong=0.25))
    assert shares == {GOOD: 0.125, LAZY: 0.5, RAMBLING: 0.125, OVERLONG: 0.25}


@pytest.mark.parametrize("steps", [1, 2, 8, 1200])
def test_optimizer_exists_for_any_length(steps: int) -> None:
    params = {"w": np.ones(3, np.float32)}
    optimizer = make_warmup_optimizer(WarmupConfig(steps=steps))
    updates, _ = optimizer.update({"w": np.ones(3, np.float32)}, optimizer.init(params), params)
    assert np.isfinite(updates["w"]).all()
