"""The metrics of a step and of a validation, on trajectories made by hand."""

import math

import numpy as np
import pytest

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.train.learn import batch_of, group_advantages, parts_of
from searchrl_jax.train.measures import (
    distributions,
    group_metrics,
    prefixed,
    rollout_metrics,
    success_metrics,
    training_metrics,
)

CONFIG = RLConfig()


def trajectory(
    reward: float | None, lengths: tuple[int, ...] = (2, 3), *, malformed: int = 0, logprob: float = -0.5
) -> Trajectory:
    """Two tokens of prompt, then turns of `lengths` tokens with two tokens of observation between them."""
    turn = [-1, -1]
    for number, length in enumerate(lengths):
        turn += [number] * length + [-1, -1]
    mask = np.array(turn[:-2]) >= 0
    return Trajectory(
        uid=0,
        task_id="t",
        token_ids=np.arange(len(mask), dtype=np.int32),
        is_action=mask,
        behavior_logprob=np.where(mask, logprob, 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn=np.array(turn[:-2], np.int32),
        status="tool_failure" if reward is None else "submitted" if reward >= 0 else "turn_limit",
        reward=reward,
        turns=tuple(
            Turn("", "", n, i >= malformed, i < malformed, None, "bm25_search" if i >= malformed else None, 0.0)
            for i, n in enumerate(lengths)
        ),
    )


def groups_of(*rewards: list[float | None]) -> list[list[Trajectory]]:
    return [[trajectory(reward) for reward in group] for group in rewards]


def measured(groups: list[list[Trajectory]], wanted: int, config: RLConfig = CONFIG) -> dict[str, float]:
    batch = batch_of(groups, config)
    return group_metrics(groups, batch.is_trained, group_advantages(batch, config)[1], wanted_groups=wanted)


PLAYED = [
    trajectory(1.0),
    trajectory(0.5, (4,)),
    trajectory(-1.0, (1, 1, 1), malformed=2),
    trajectory(None, (2,), logprob=0.0),
]


def test_short_metrics_by_hand() -> None:
    found = rollout_metrics(PLAYED)
    assert found["reward"] == pytest.approx(0.5 / 3)
    assert found["ndcg@10"] == pytest.approx(1.5 / 3)
    assert found["ndcg@10_completed"] == pytest.approx(0.75)
    assert found["failure_rate"] == 0.5
    assert found["failures/turn_limit"] == found["failures/tool_failure"] == 0.25
    assert found["malformed_rate"] == pytest.approx(2 / 7)
    assert found["searches"] == pytest.approx(5 / 4)
    assert found["turns"] == pytest.approx(7 / 4)
    assert found["action_tokens"] == pytest.approx((5 + 4 + 3 + 2) / 4)
    assert found["tokens"] == pytest.approx((9 + 6 + 9 + 4) / 4)
    assert found["masked_rollouts"] == 1


def test_distributions_by_hand() -> None:
    found = distributions([PLAYED[:2], PLAYED[2:]])
    rewards = np.array([1.0, 0.5, -1.0])
    assert found["reward/mean"] == pytest.approx(rewards.mean())
    assert found["reward/std"] == pytest.approx(rewards.std())
    assert (found["reward/min"], found["reward/max"], found["reward/zero_frac"]) == (-1, 1, 0)
    assert (found["turns/mean"], found["turns/min"], found["turns/max"]) == (1.75, 1, 3)
    turns = np.array([2, 3, 4, 1, 1, 1, 2])
    assert found["tokens/response_mean"] == turns.mean() and found["tokens/response_std"] == turns.std()
    assert (found["tokens/response_min"], found["tokens/response_max"], found["tokens/prompt_mean"]) == (1, 4, 2)
    assert (found["logprob/zero_count"], found["logprob/zero_per_group"]) == (2, 1)
    assert found["logprob/zero_frac"] == pytest.approx(2 / 14)
    assert found["logprob/nz_mean"] == found["logprob/nz_min"] == found["logprob/nz_max"] == -0.5
    assert found["logprob/nz_std"] == 0


def test_a_group_whose_tools_all_failed_leaves_no_number_but_its_failures() -> None:
    played = [trajectory(None, logprob=0.0), trajectory(None, logprob=0.0)]
    short, found = rollout_metrics(played), distributions([played])
    assert all(math.isnan(short[name]) for name in ("reward", "ndcg@10", "ndcg@10_completed"))
    assert short["failures/tool_failure"] == 1.0 and short["masked_rollouts"] == 2
    assert math.isnan(found["reward/mean"]) and math.isnan(found["logprob/nz_mean"])
    assert math.isnan(rollout_metrics([trajectory(-1.0)])["ndcg@10_completed"])


def test_group_metrics_by_hand() -> None:
    groups = groups_of(
        [1.0, 0.0, None], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [-1.0, -1.0, None], [None, None, None], [0.5, 1.0, 0.75]
    )
    found = measured(groups, 8)
    assert found["analysis/batch_completion_ratio"] == 6 / 8
    assert found["analysis/batch_valid_ratio"] == pytest.approx(2 / 6)
    assert found["analysis/zero_adv_groups"] == 4
    assert found["analysis/zero_adv_nonzero_reward"] == 1, "all right"
    assert found["analysis/zero_adv_zero_reward"] == 2, "all wrong; where no tool worked it is neither"
    assert found["rollout/reward/valid_mean"] == pytest.approx((1.0 + 0.0 + 0.5 + 1.0 + 0.75) / 5)
    means = [0.5, 0.5, 0.0, -1.0, 0.75]
    assert found["analysis/reward_variance_across_groups"] == pytest.approx(np.var(means))
    assert found["analysis/mean_group_reward_spread"] == pytest.approx((1.0 + 0 + 0 + 0 + 0.5) / 5)
    assert (found["rollout/advantage/n_positive"], found["rollout/advantage/n_negative"]) == (2, 2)
    assert found["rollout/advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert found["rollout/advantage/max"] == pytest.approx(1, rel=1e-4)
    nothing = measured(groups[4:5], 1)
    assert math.isnan(nothing["rollout/reward/valid_mean"]) and math.isnan(nothing["rollout/advantage/std"])
    assert nothing["analysis/batch_valid_ratio"] == 0
    alone = measured(groups, 6, RLConfig(advantage_method="monte_carlo"))
    assert alone["analysis/zero_adv_groups"] == 1, "a method without the group's baseline trains on all that is valid"


def test_valid_mean_is_the_mean_where_no_group_was_left_out() -> None:
    groups = groups_of([1.0, 0.0], [0.5, 0.25])
    found = measured(groups, 2)
    assert found["rollout/reward/valid_mean"] == pytest.approx(distributions(groups)["reward/mean"])


def test_training_metrics_by_hand() -> None:
    groups = groups_of([1.0, 0.0], [0.5, 0.5])
    samples = [part.sample for part in parts_of(groups, batch_of(groups, CONFIG).is_trained)]
    found = training_metrics(groups, samples, num_trained=2)
    assert found == prefixed(
        "training",
        {
            "num_groups": 2,
            "num_trajectories": 4,
            "total_tokens": 36,
            "action_tokens_mean": 5,
            "obs_tokens_mean": 4,
            "num_datums": 2,
            "datums_per_trajectory": 1,
            "trainable_token_positions": 10,
            "nontrainable_token_positions": 8,
            "trainable_token_ratio": 10 / 18,
        },
    )
    empty = training_metrics(groups[1:], [], num_trained=0)
    assert math.isnan(empty["training/datums_per_trajectory"]) and math.isnan(empty["training/trainable_token_ratio"])


def test_success_metrics_by_hand() -> None:
    groups = groups_of([1.0, 0.0, 0.0], [1.0, 1.0, None], [0.5, 0.5, -1.0])
    found = success_metrics(groups, success_threshold=1.0, pass_k_values=(1, 2, 4))
    assert found["reward/num_prompts"] == found["reward/rollouts_per_prompt"] == 3
    assert (found["reward/succeeded_rollouts"], found["reward/failed_rollouts"]) == (3, 6)
    assert found["reward/success_threshold"] == 1.0
    assert found["reward/pass_at_1"] == found["reward/pass_power_1"] == pytest.approx(1 / 3)
    # Of the three pairs of tries: two hold the one success; all hold one of two; none.
    assert found["reward/pass_at_2"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["reward/pass_power_2"] == pytest.approx((0 + 1 / 3 + 0) / 3)
    assert "reward/pass_at_4" not in found, "three tries cannot say what four would do"
    assert found["reward/min_within_groups"] == pytest.approx((0 + 1 - 1) / 3)
    assert found["reward/max_within_groups"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert found["reward/mean_within_groups"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    stds = [np.std([1.0, 0, 0]), 0, np.std([0.5, 0.5, -1])]
    assert found["reward/std_within_groups"] == pytest.approx(np.mean(stds))
    lower = success_metrics(groups, success_threshold=0.5, pass_k_values=(1,))
    assert lower["reward/succeeded_rollouts"] == 5
