"""Batches that are filled up: which groups are played, and what the stream learns of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.rollout.collect import Request
from searchrl_jax.rollout.engine import Sampling
from searchrl_jax.rollout.refill import play_batch, record_pass_rates
from searchrl_jax.rollout.source import Plan, SynchronousSource
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.train.learn import batch_of

SPREAD, FLAT = [1.0, 0.0, 0.0, 0.0], [0.0] * 4


def group_of(rewards: list[float | None], task_id: str = "q0") -> list[Trajectory]:
    mask = np.array([False, True])
    fields: dict[str, Any] = {
        "token_ids": np.array([1, 2], np.int32),
        "is_action": mask,
        "behavior_logprob": np.where(mask, -1, 0).astype(np.float32),
        "policy_version": np.where(mask, 0, -1).astype(np.int32),
        "turn": np.where(mask, 0, -1).astype(np.int32),
    }
    return [
        Trajectory(uid, task_id, status="tool_failure" if reward is None else "submitted", reward=reward, **fields)
        for uid, reward in enumerate(rewards)
    ]


def teaches(groups: Any, method: Any = "group_based") -> np.ndarray:
    return batch_of(groups, RLConfig(advantage_method=method)).teaches


class Game:
    """Plays prompts whose groups are flat where the script says so, and remembers what it was asked for."""

    def __init__(self, flat: set[str]) -> None:
        self.flat = flat
        self.calls: list[tuple[list[str], int]] = []

    def __call__(self, tasks: Any, attempt: int) -> list[list[Trajectory]]:
        self.calls.append(([task.task_id for task in tasks], attempt))
        return [group_of(FLAT if task.task_id in self.flat else SPREAD, task.task_id) for task in tasks]


def stream_of(count: int, batch: int = 4) -> TaskStream:
    return TaskStream([Task(f"q{i}", "query", {"d": 1}) for i in range(count)], batch, seed=0)


def order_of(count: int) -> list[str]:
    return [task.task_id for task in stream_of(count, count).next_batch()]


def test_without_refills_a_batch_is_what_the_stream_gives() -> None:
    game = Game(set(order_of(12)))
    tasks, groups = play_batch(stream_of(12), game, refills=0, teaches=teaches)
    assert game.calls == [(order_of(12)[:4], 0)] and len(tasks) == len(groups) == 4


def test_fault_20_a_batch_is_filled_up_to_its_size_by_fresh_prompts() -> None:
    order = order_of(12)
    game = Game({order[0], order[2], order[4]})
    tasks, groups = play_batch(stream_of(12), game, refills=3, teaches=teaches)
    # Two of the first four are flat; one of the two that make up for them is; the next is not.
    assert game.calls == [(order[:4], 0), (order[4:6], 1), (order[6:7], 2)]
    assert [task.task_id for task in tasks] == order[:7] == [group[0].task_id for group in groups]
    assert all(len(group) == 4 for group in groups), "a group is kept as a whole"
    is_trained = batch_of(groups, RLConfig()).is_trained
    assert is_trained.all(axis=1).sum() == 4 == is_trained.any(axis=1).sum(), "or left out as a whole"


def test_nothing_is_made_up_for_where_the_learner_trains_on_equal_rewards() -> None:
    game = Game(set(order_of(12)))
    play_batch(stream_of(12), game, refills=3, teaches=lambda groups: teaches(groups, "monte_carlo"))
    assert len(game.calls) == 1


def test_each_try_of_each_step_has_numbers_of_its_own() -> None:
    class Player:
        retries = sampled_tokens = 0

        def __init__(self) -> None:
            self.uids: list[list[int]] = []

        def play(self, params: Any, requests: list[Request], *_: Any, policy_version: int) -> list[Trajectory]:
            self.uids.append([request.uid for request in requests])
            played = group_of(FLAT)[:1] * len(requests)
            return [replace(each, task_id=request.task.task_id) for each, request in zip(played, requests, strict=True)]

    player: Any = Player()
    source = SynchronousSource(player, stream_of(12), Sampling(), Plan(4, 2, 2), refills=1, teaches=teaches)
    taken = [source.take({}, version) for version in range(2)]
    assert player.uids == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]
    assert [len(each.tasks) for each in taken] == [len(each.groups) for each in taken] == [8, 8]
    player.uids.clear()
    source = SynchronousSource(player, stream_of(12), Sampling(), Plan(4, 2, 2))
    for version in range(2):
        source.take({}, version)
    assert player.uids == [list(range(8)), list(range(8, 16))]


def test_tries_are_bounded_and_end_where_there_is_no_fresh_prompt() -> None:
    hopeless = Game(set(order_of(12)))
    tasks, _ = play_batch(stream_of(12), hopeless, refills=1, teaches=teaches)
    assert len(tasks) == 8 and len(hopeless.calls) == 2
    tasks, _ = play_batch(stream_of(12), hopeless, refills=9, teaches=teaches)
    assert sorted(task.task_id for task in tasks) == sorted(order_of(12)), "each prompt once"


def test_a_filled_batch_is_the_same_after_a_resume() -> None:
    flat = {f"q{i}" for i in range(0, 12, 3)}
    whole_stream, whole = stream_of(12), Game(flat)
    for _ in range(6):
        play_batch(whole_stream, whole, refills=2, teaches=teaches)
    stream, calls = stream_of(12), []
    for _ in range(6):
        state = stream.state()
        play_batch(stream, Game(flat), refills=2, teaches=teaches)  # killed before its checkpoint
        stream = stream_of(12)
        stream.restore(state)
        game = Game(flat)
        play_batch(stream, game, refills=2, teaches=teaches)
        calls += game.calls
    assert calls == whole.calls


def test_pass_rates_are_of_the_rollouts_whose_tools_worked() -> None:
    stream = TaskStream([Task(f"q{i}", "query", {"d": 1}) for i in range(3)], 1, seed=0, curriculum=True)
    groups = [group_of([1.0, 0.5, None, 0.4], "q0"), group_of([None, None], "q1"), group_of([-1.0, 0.0], "q2")]
    record_pass_rates(stream, groups, threshold=0.5)
    assert stream.pass_rate("q0") == pytest.approx(0.5 + 0.5 * (2 / 3 - 0.5))
    assert stream.pass_rate("q1") == 0.5, "nothing was measured"
    assert stream.pass_rate("q2") == 0.25
