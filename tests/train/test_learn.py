"""From groups of trajectories to training samples on trajectories made by hand."""

from typing import Any

import numpy as np
import pytest

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.train.learn import (
    group_advantages,
    group_rewards,
    samples_of,
    split_minibatches,
)

CONFIG = RLConfig()


def trajectory(
    reward: float | None, *, uid: int = 0, lengths: tuple[int, ...] = (2, 3), malformed: int = 0, **changes: Any
) -> Trajectory:
    """Two tokens of prompt, then turns of `lengths` tokens with two tokens of observation after each."""
    is_action = [False, False]
    for length in lengths:
        is_action += [True] * length + [False, False]
    mask = np.array(is_action)
    turns = tuple(
        Turn("", "", n, i >= malformed, i < malformed, None, "bm25_search" if i >= malformed else None, 0.0)
        for i, n in enumerate(lengths)
    )
    status = "tool_failure" if reward is None else "submitted" if reward >= 0 else "turn_limit"
    fields: dict[str, Any] = {
        "uid": uid,
        "task_id": "t",
        "token_ids": np.arange(len(mask), dtype=np.int32),
        "is_action": mask,
        "behavior_logprob": np.where(mask, -0.5, 0).astype(np.float32),
        "policy_version": np.where(mask, 0, -1).astype(np.int32),
        "turn": np.zeros(len(mask), np.int32),
        "status": status,
        "reward": reward,
        "turns": turns,
    }
    return Trajectory(**(fields | changes))


def groups_of(*rewards: list[float | None]) -> list[list[Trajectory]]:
    return [[trajectory(reward) for reward in group] for group in rewards]


def test_tool_failure_is_masked_and_leaves_the_baseline_of_the_others_alone() -> None:
    advantages, is_trained = group_advantages(groups_of([1.0, 0.0, None, 0.5]), CONFIG)
    assert is_trained.tolist() == [[True, True, False, True]]
    alone, _ = group_advantages(groups_of([1.0, 0.0, 0.5]), CONFIG)
    assert advantages[0, 2] == 0
    np.testing.assert_allclose(advantages[0, [0, 1, 3]], alone[0], rtol=1e-6)
    # (r - mean) / (std + 1e-6) with mean 0.5 and unbiased std 0.5
    np.testing.assert_allclose(alone[0], np.array([0.5, -0.5, 0.0]) / (0.5 + 1e-6), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "group", [[0.5, 0.5, 0.5], [-1.0, -1.0, -1.0], [None, 0.5, 0.5], [None, None, 0.5], [None] * 3]
)
def test_flat_groups_are_left_out(group: list[float | None]) -> None:
    groups = groups_of([1.0, 0.0, 0.5], group)
    advantages, is_trained = group_advantages(groups, CONFIG)
    assert is_trained.tolist() == [[True] * 3, [False] * 3]
    assert not advantages[1].any()
    assert len(samples_of(groups, advantages, is_trained)) == 3


@pytest.mark.parametrize("method", ["monte_carlo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg"])
def test_every_method_takes_the_groups_and_masks_the_same(method: Any) -> None:
    groups = groups_of([1.0, 0.0, None], [0.5, 0.5, 0.5])
    advantages, is_trained = group_advantages(groups, RLConfig(advantage_method=method))
    assert advantages.shape == (2, 3) and np.isfinite(advantages).all()
    assert not advantages[~is_trained].any()
    assert advantages[0, 0] > advantages[0, 1]


def test_rewards_put_zero_in_the_place_of_a_masked_one() -> None:
    rewards, is_valid = group_rewards(groups_of([0.25, None]))
    assert rewards.tolist() == [[0.25, 0.0]] and is_valid.tolist() == [[True, False]]


def test_samples_end_at_the_last_action_and_carry_the_advantage() -> None:
    groups = groups_of([1.0, 0.0])
    advantages, is_trained = group_advantages(groups, CONFIG)
    samples = samples_of(groups, advantages, is_trained)
    for sample, advantage in zip(samples, advantages[0], strict=True):
        assert sample.is_action.tolist() == [False, False, True, True, False, False, True, True, True]
        assert len(sample.token_ids) == len(sample.behavior_logprob) == 9
        assert (sample.advantage == advantage).all()
        assert (sample.behavior_logprob[sample.is_action] == -0.5).all()


def test_rollout_without_log_probabilities_is_an_error() -> None:
    groups = groups_of([1.0, 0.0])
    groups[0][1] = trajectory(0.0, uid=17, behavior_logprob=np.zeros(11, np.float32))
    advantages, is_trained = group_advantages(groups, CONFIG)
    with pytest.raises(ValueError, match="rollout 17 .*log-probabilities"):
        samples_of(groups, advantages, is_trained)


def test_minibatches_hold_every_sample_once() -> None:
    groups = [[trajectory(r, uid=i * 2 + j) for j, r in enumerate((1.0, 0.0))] for i in range(5)]
    advantages, is_trained = group_advantages(groups, CONFIG)
    samples = samples_of(groups, advantages, is_trained)
    parts = split_minibatches(samples, 3, np.random.default_rng(0))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert {id(sample) for part in parts for sample in part} == {id(sample) for sample in samples}
    again = split_minibatches(samples, 3, np.random.default_rng(0))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in parts]


def test_fewer_samples_than_minibatches_leave_none_empty() -> None:
    assert split_minibatches([], 2, np.random.default_rng(0)) == []
    groups = groups_of([1.0, 0.0])
    samples = samples_of(groups, *group_advantages(groups, CONFIG))
    assert [len(part) for part in split_minibatches(samples, 4, np.random.default_rng(0))] == [1, 1]
