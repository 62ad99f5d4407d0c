"""From groups of trajectories to training samples on trajectories made by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.rl.advantages import ADVANTAGES
from searchrl_jax.rollout.batch import Sample
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.train.learn import (
    METHODS,
    WITHOUT_GROUP_BASELINE,
    Part,
    batch_of,
    gae_advantages,
    group_advantages,
    parts_of,
    split_minibatches,
    to_table,
    with_tables,
)

CONFIG = RLConfig()


def trajectory(
    reward: float | None, *, uid: int = 0, lengths: tuple[int, ...] = (2, 3), malformed: int = 0, **changes: Any
) -> Trajectory:
    """Two tokens of prompt, then turns of `lengths` tokens with two tokens of observation after each."""
    is_action, turn = [False, False], [-1, -1]
    for number, length in enumerate(lengths):
        is_action += [True] * length + [False, False]
        turn += [number] * length + [-1, -1]
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
        "turn": np.array(turn, np.int32),
        "status": status,
        "reward": reward,
        "turns": turns,
    }
    return Trajectory(**(fields | changes))


def groups_of(*rewards: list[float | None]) -> list[list[Trajectory]]:
    return [[trajectory(reward) for reward in group] for group in rewards]


def advantages_of(groups: list[list[Trajectory]], config: RLConfig = CONFIG) -> tuple[np.ndarray, np.ndarray]:
    """The advantage of each rollout's first action token, and which rollouts are trained, [P, G] both."""
    batch = batch_of(groups, config)
    table, _ = group_advantages(batch, config)
    assert not table[~batch.trained_tokens].any()
    return table[:, 0].reshape(batch.rewards.shape), batch.is_trained


def samples_of(groups: list[list[Trajectory]], config: RLConfig = CONFIG) -> list[Sample]:
    batch = batch_of(groups, config)
    table, _ = group_advantages(batch, config)
    return [with_tables(part, {"advantage": table}) for part in parts_of(groups, batch.is_trained)]


def test_tool_failure_is_masked_and_leaves_the_baseline_of_the_others_alone() -> None:
    advantages, is_trained = advantages_of(groups_of([1.0, 0.0, None, 0.5]))
    assert is_trained.tolist() == [[True, True, False, True]]
    alone, _ = advantages_of(groups_of([1.0, 0.0, 0.5]))
    assert advantages[0, 2] == 0
    np.testing.assert_allclose(advantages[0, [0, 1, 3]], alone[0], rtol=1e-6)
    # (r - mean) / (std + 1e-6) with mean 0.5 and unbiased std 0.5
    np.testing.assert_allclose(alone[0], np.array([0.5, -0.5, 0.0]) / (0.5 + 1e-6), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_a_reward_that_is_no_number_masks_its_rollout_alone(missing: float) -> None:  # fault 15
    groups = groups_of([1.0, 0.0, 0.5])
    groups[0].append(trajectory(missing))
    advantages, is_trained = advantages_of(groups)
    assert is_trained.tolist() == [[True, True, True, False]]
    np.testing.assert_array_equal(advantages[0, :3], advantages_of(groups_of([1.0, 0.0, 0.5]))[0][0])
    groups[0][3] = trajectory(None, status="submitted")
    assert batch_of(groups, CONFIG).is_trained.tolist() == [[True, True, True, False]]
    groups[0][3] = trajectory(1.0, turn_rewards=(missing, 1.0))
    assert batch_of(groups, RLConfig(advantage_method="monte_carlo")).is_trained.tolist() == [[True, True, True, False]]


FLAT = [[0.5, 0.5, 0.5], [-1.0, -1.0, -1.0], [None, 0.5, 0.5], [None, None, 0.5], [None] * 3]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", FLAT)
def test_flat_groups_are_left_out_where_the_baseline_is_the_group(group: list[float | None], method: Any) -> None:
    groups = groups_of([1.0, 0.0, 0.0], group)
    config = RLConfig(advantage_method=method)
    batch = batch_of(groups, config)
    assert batch.is_flat.tolist() == [False, True]
    keeps = method in WITHOUT_GROUP_BASELINE
    assert batch.is_trained.tolist() == [[True] * 3, [keeps and reward is not None for reward in group]]
    assert len(parts_of(groups, batch.is_trained)) == batch.is_trained.sum()
    if method in ADVANTAGES:
        table, estimates = group_advantages(batch, config)
        assert np.isfinite(table).all() and np.isfinite(estimates).all()
        kept = batch.trained_tokens[3:]
        assert bool(table[3:][kept].any()) == (keeps and kept.any()), "monte_carlo and reinforce_pp have a signal here"


@pytest.mark.parametrize("method", sorted(ADVANTAGES))
@pytest.mark.parametrize("normalize", [None, True, False])
def test_the_estimator_s_own_normalisation_unless_told(method: Any, normalize: bool | None) -> None:
    groups = [
        [trajectory(r, lengths=n) for r, n in zip(rewards, ((2, 3), (4,), (1, 1)), strict=True)]
        for rewards in ((1.0, 0.0, 0.25), (0.5, -1.0, 0.0))
    ]
    found, is_trained = advantages_of(groups, RLConfig(advantage_method=method, advantage_normalization=normalize))
    assert is_trained.all()
    rewards = np.array([[t.reward for t in group] for group in groups])
    turn_rewards = np.zeros((2, 3, 2))
    for p, g, turns in ((0, 0, 2), (0, 1, 1), (0, 2, 2), (1, 0, 2), (1, 1, 1), (1, 2, 2)):
        turn_rewards[p, g, turns - 1] = rewards[p, g]
    tokens = np.array([[[2, 3], [4, 0], [1, 1]]] * 2)
    expected = ADVANTAGES[method](
        rewards, turn_rewards=turn_rewards, is_turn=tokens > 0, action_tokens=tokens, normalize=normalize
    )
    expected = expected[..., 0] if expected.ndim == 3 else expected
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_turn_rewards_reach_the_tokens_of_their_turn() -> None:
    groups = [[trajectory(1.0, lengths=(2, 1, 3), turn_rewards=(0.5, -1.0, 2.0)), trajectory(0.0, lengths=(1, 2))]]
    config = RLConfig(advantage_method="monte_carlo", advantage_normalization=False, gamma=0.5)
    table, estimates = group_advantages(batch_of(groups, config), config)
    np.testing.assert_allclose(table[0], [0.5, 0.5, 0.0, 2.0, 2.0, 2.0, 0, 0], atol=1e-6)  # 0.5 - 0.5 + 0.5, -1 + 1, 2
    assert not table[1].any() and len(estimates) == 5
    (sample,) = (s for s in samples_of(groups, config) if len(s.token_ids) == 12)
    assert sample.advantage.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0, 0, 2, 2, 2]
    assert sample.trajectory_tokens == 6


def test_without_turn_rewards_every_turn_carries_the_reward_at_the_end() -> None:  # fault 16
    for method in ("monte_carlo", "reinforce_pp", "group_based_per_turn"):
        config = RLConfig(advantage_method=method, advantage_normalization=False)
        groups = [[trajectory(1.0, lengths=(2, 2, 2)), trajectory(0.0, lengths=(2, 2, 2))]]
        table, _ = group_advantages(batch_of(groups, config), config)
        assert len(set(table[0][:6])) == 1 and table[0, 0] > 0


def test_a_group_equal_in_sum_may_differ_in_its_turns() -> None:
    config = RLConfig(advantage_method="group_based_per_turn")
    one, other = trajectory(1.0, turn_rewards=(1.0, 0.0)), trajectory(1.0, turn_rewards=(0.0, 1.0))
    assert batch_of([[one, other]], config).is_trained.all()
    assert not batch_of([[one, one]], config).is_trained.any()
    assert not batch_of([[one, other]], RLConfig(advantage_method="group_based")).is_trained.any()


def test_leaving_flat_groups_out_scales_gpg_as_its_paper_does() -> None:
    """alpha = B / (B - M) on the mean over all rollouts is the mean over those in groups with a spread."""
    groups = groups_of([1.0, 0.0, 0.25], [0.5, 0.5, 0.5], [-1.0, 0.0, None], [0.0, 0.0, 0.0])
    config = RLConfig(advantage_method="gpg")
    batch = batch_of(groups, config)
    table, _ = group_advantages(batch, config)
    per_token = table / batch.trained_tokens.sum()
    everyone = batch.is_valid.reshape(-1, 1) & batch.is_action
    paper = np.asarray(ADVANTAGES["gpg"](batch.rewards, is_valid=batch.is_valid)).reshape(-1, 1) * everyone
    np.testing.assert_allclose(per_token, paper / everyone.sum(), rtol=1e-5, atol=1e-8)
    assert paper[0, 0] == pytest.approx(11 / 5 * (1 - 1.25 / 3), rel=1e-5)


def test_a_penalty_does_not_revive_a_group_without_variance() -> None:  # fault 20
    groups = groups_of([0.0, 0.0], [1.0, 0.0])
    batch = batch_of(groups, CONFIG)
    penalty = np.where(batch.is_action, np.arange(4)[:, None], 0.0).astype(np.float32)
    table, _ = group_advantages(batch, CONFIG, penalty)
    assert batch.is_trained.tolist() == [[False, False], [True, True]] and not table[:2].any()


@pytest.mark.parametrize("method", [name for name in METHODS if name not in WITHOUT_GROUP_BASELINE])
def test_what_malformed_turns_are_charged_does_not_revive_one_either(method: str) -> None:  # fault 20
    charged = [
        trajectory(
            -0.1 * count, components={"malformed": -0.1 * count}, turn_rewards=(-0.1 * count, 0.0), status="submitted"
        )
        for count in (0, 1, 0, 1)
    ]
    alive = [trajectory(reward) for reward in (0.0, 0.5, 1.0, 0.0)]
    teaches = batch_of([charged, alive], RLConfig(advantage_method=method)).teaches
    # Turn by turn the charge is what there is to learn from.
    assert teaches.tolist() == [method == "group_based_per_turn", True]


def test_a_tie_for_the_best_teaches_nothing_where_the_best_is_all_that_counts() -> None:
    groups = groups_of([1.0, 1.0, 0.0], [1.0, 0.5, 0.0])
    assert batch_of(groups, RLConfig(advantage_method="grpo_passk")).teaches.tolist() == [False, True]
    assert batch_of(groups, RLConfig(advantage_method="rloo")).teaches.tolist() == [True, True]


def test_a_penalty_is_taken_off_the_turn_that_it_fell_in() -> None:
    groups = [[trajectory(1.0, lengths=(2, 1)), trajectory(0.0, lengths=(1, 2))]]
    penalty = np.array([[0.1, 0.2, 0.4, 0.0], [1.0, 2.0, 3.0, 0.0]], np.float32)
    per_turn = RLConfig(advantage_method="monte_carlo", advantage_normalization=False)
    table, _ = group_advantages(batch_of(groups, per_turn), per_turn, penalty)
    np.testing.assert_allclose(table, [[0.3, 0.3, 0.6, 0.0], [-6.0, -5.0, -5.0, 0.0]], atol=1e-6)
    whole = RLConfig(advantage_method="group_based", advantage_normalization=False)
    table, _ = group_advantages(batch_of(groups, whole), whole, penalty)
    np.testing.assert_allclose(table[:, 0], [(0.3 + 6.0) / 2, (-6.0 - 0.3) / 2], atol=1e-6)


def test_turn_rewards_for_other_turns_than_were_played_are_refused() -> None:
    groups = [[trajectory(1.0, uid=5, turn_rewards=(1.0,)), trajectory(0.0)]]
    with pytest.raises(ValueError, match="rollout 5 .*each of its 2 turns, got 1"):
        batch_of(groups, CONFIG)


@pytest.mark.parametrize(("gamma", "trace"), [(1.0, 1.0), (0.9, 0.8)])
def test_gae_equals_a_loop_over_turns_paid_at_their_last_token(gamma: float, trace: float) -> None:
    groups = [
        [trajectory(1.0, lengths=(2, 3)), trajectory(0.5, lengths=(1,))],
        [trajectory(None), trajectory(2.0, lengths=(1, 1, 2), turn_rewards=(0.5, 0.0, -1.0))],
    ]
    config = RLConfig(advantage_method="gae", gamma=gamma, gae_lambda=trace, advantage_normalization=False)
    batch = batch_of(groups, config)
    rng = np.random.default_rng(0)
    value, penalty = rng.normal(size=(2, *batch.is_action.shape)).astype(np.float32)
    advantage, target = gae_advantages(batch, config, value, penalty)
    paid = [{4: 1.0}, {0: 0.5}, {}, {0: 0.5, 1: 0.0, 3: -1.0}]  # by action token
    for n, count in enumerate((5, 1, 0, 4)):
        next_value = next_advantage = 0.0
        for t in reversed(range(count)):
            reward = paid[n].get(t, 0.0) - penalty[n, t]
            a = reward + gamma * next_value - value[n, t] + gamma * trace * next_advantage
            assert advantage[n, t] == pytest.approx(a, abs=1e-5)
            assert target[n, t] == pytest.approx(a + value[n, t], abs=1e-5)
            next_value, next_advantage = value[n, t], a
        assert not advantage[n, count:].any() and not target[n, count:].any()
    normalized = RLConfig(advantage_method="gae", gamma=gamma, gae_lambda=trace)
    whitened, same = gae_advantages(batch, normalized, value, penalty)
    np.testing.assert_array_equal(same, target)
    tokens = whitened[batch.trained_tokens]
    assert abs(tokens.mean()) < 1e-5 and tokens.std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_samples_end_at_the_last_action_and_carry_the_advantage() -> None:
    groups = groups_of([1.0, 0.0])
    advantages, _ = advantages_of(groups)
    for sample, advantage in zip(samples_of(groups), advantages[0], strict=True):
        assert sample.is_action.tolist() == [False, False, True, True, False, False, True, True, True]
        assert len(sample.token_ids) == len(sample.behavior_logprob) == 9
        assert (sample.advantage[sample.is_action] == advantage).all()
        assert (sample.behavior_logprob[sample.is_action] == -0.5).all()


def test_tables_and_samples_are_inverse() -> None:
    groups = [[trajectory(1.0, lengths=(2, 3)), trajectory(0.0, lengths=(4,))]]
    batch = batch_of(groups, CONFIG)
    parts = parts_of(groups, batch.is_trained)
    # The second trajectory in two parts, as if one row could not hold it.
    halves = [
        replace(parts[1].sample, is_action=np.array(mask, bool)) for mask in ([0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 2)
    ]
    parts = [parts[0], Part(halves[0], 1, 0), Part(halves[1], 1, 2)]
    table = np.where(batch.is_action, np.arange(16).reshape(2, 8), 0).astype(np.float32)
    values = [with_tables(part, {"value": table}).value for part in parts]
    assert [v[p.sample.is_action].tolist() for v, p in zip(values, parts, strict=True)] == [
        [0, 1, 2, 3, 4],
        [8, 9],
        [10, 11],
    ]
    back = to_table(parts, [v[p.sample.is_action] for v, p in zip(values, parts, strict=True)], table.shape)
    np.testing.assert_array_equal(back, table)


def test_rollout_without_log_probabilities_is_an_error() -> None:  # fault 7
    groups = groups_of([1.0, 0.0])
    groups[0][1] = trajectory(0.0, uid=17, behavior_logprob=np.full(11, np.nan, np.float32))
    with pytest.raises(ValueError, match="rollout 17 .*log-probabilities"):
        samples_of(groups)
    nothing = [[trajectory(reward, behavior_logprob=np.zeros(11, np.float32)) for reward in (1.0, 0.0)]]
    with pytest.raises(ValueError, match="got 0 in all"):
        samples_of(nothing)


def test_a_rollout_may_be_certain_of_all_its_tokens() -> None:
    """Where top-p leaves one token its log-probability is 0 exactly, and a sure policy writes whole rollouts so."""
    groups = groups_of([1.0, 0.0])
    groups[0][1] = trajectory(0.0, uid=17, behavior_logprob=np.zeros(11, np.float32))
    assert len(samples_of(groups)) == 2


def test_a_compressed_rollout_is_its_rows_and_each_takes_its_part_of_the_tables() -> None:
    played = trajectory(1.0, lengths=(2, 1, 3), turn_rewards=(0.5, -1.0, 2.0), row_starts=(0, 8))
    # PPaaooao|oaaaoo in the arrays: a row ends with its last action, and what follows it is not learnt from.
    groups = [[played, trajectory(0.0, lengths=(1, 2), turn_rewards=(0.0, 0.0))]]
    config = RLConfig(advantage_method="monte_carlo", advantage_normalization=False, gamma=0.5)
    batch = batch_of(groups, config)
    table, _ = group_advantages(batch, config)
    parts = parts_of(groups, batch.is_trained)
    assert [(part.rollout, part.columns) for part in parts] == [
        (0, slice(0, 3)),
        (0, slice(3, 6)),
        (1, slice(0, 3)),
    ]
    first, second, _ = (with_tables(part, {"advantage": table}) for part in parts)
    assert first.token_ids.tolist() == list(range(7)) and second.token_ids.tolist() == list(range(8, 12))
    assert first.advantage[first.is_action].tolist() == [0.5, 0.5, 0.0] and second.advantage.tolist() == [0, 2, 2, 2]
    assert (first.trajectory_tokens, second.trajectory_tokens) == (6, 6)
    values = [table[part.rollout, part.columns] for part in parts]
    np.testing.assert_array_equal(to_table(parts, values, table.shape), table)


def test_minibatches_hold_every_sample_once() -> None:
    samples = samples_of([[trajectory(r, uid=i * 2 + j) for j, r in enumerate((1.0, 0.0))] for i in range(5)])
    parts = split_minibatches(samples, range(10), 3, np.random.default_rng(0))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert {id(sample) for part in parts for sample in part} == {id(sample) for sample in samples}
    again = split_minibatches(samples, range(10), 3, np.random.default_rng(0))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in parts]


def test_the_rows_of_a_compressed_rollout_stay_in_one_minibatch() -> None:
    samples = samples_of([[trajectory(r, uid=i * 2 + j) for j, r in enumerate((1.0, 0.0))] for i in range(3)])
    whose = [0, 0, 0, 1, 2, 2]
    parts = split_minibatches(samples, whose, 3, np.random.default_rng(0))
    owner = {id(sample): rollout for sample, rollout in zip(samples, whose, strict=True)}
    assert sorted(sorted({owner[id(sample)] for sample in part}) for part in parts) == [[0], [1], [2]]
    assert sum(map(len, parts)) == 6


def test_fewer_samples_than_minibatches_leave_none_empty() -> None:
    assert split_minibatches([], [], 2, np.random.default_rng(0)) == []
    samples = samples_of(groups_of([1.0, 0.0]))
    assert [len(part) for part in split_minibatches(samples, [0, 1], 4, np.random.default_rng(0))] == [1, 1]
