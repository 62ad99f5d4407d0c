"""The metrics of a step and of a validation; docs/metrics.md lists every name with its meaning and unit.

Names with a slash are the published service's. Short ones are what the curves and the terminal's line show.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from searchrl_jax.env.rewards import STATUSES, SUBMITTED
from searchrl_jax.evaluation.metrics import pass_at_k, pass_power_k
from searchrl_jax.rollout.batch import Sample
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.train.learn import Groups

Values = Sequence[float] | np.ndarray

_REDUCTIONS: Mapping[str, Callable[[Values], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "std": lambda values: float(np.std(values)),
    "min": lambda values: float(np.min(values)),
    "max": lambda values: float(np.max(values)),
}

# Above the rounding of an nDCG, far below the difference of two.
ROUNDING = 1e-6


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What trajectories say of the policy that sampled them, in few numbers.

    nDCG@10 counts a failed rollout as 0; one whose tool failed counts in the failure rates alone.
    """
    count = len(trajectories)
    valid = [t for t in trajectories if t.is_valid]
    submitted = [t for t in valid if t.is_submitted]
    calls = [turn for t in trajectories for turn in t.turns]
    statuses = Counter(t.status for t in trajectories)
    return {
        "reward": _mean([t.reward for t in valid if t.reward is not None]),
        "ndcg@10": _mean([t.ndcg for t in valid]),
        "ndcg@10_completed": _mean([t.ndcg for t in submitted]),
        "failure_rate": 1 - statuses[SUBMITTED] / count,
        "malformed_rate": _mean([turn.is_malformed for turn in calls]),
        "searches": sum(turn.tool is not None for turn in calls) / count,
        "turns": _mean([len(t.turns) for t in trajectories]),
        "action_tokens": _mean([t.num_action_tokens for t in trajectories]),
        "tokens": _mean([len(t.token_ids) for t in trajectories]),
        "masked_rollouts": float(count - len(valid)),
    } | {f"failures/{status}": statuses[status] / count for status in STATUSES if status != SUBMITTED}


def distributions(groups: Groups) -> dict[str, float]:
    """Rewards, turns, tokens and log-probabilities of the rollouts, under the service's names without their prefix.

    Rewards are of the rollouts that have one. A log-probability of exactly 0 is of a token that could not have been
    another, as every one is under greedy decoding; `nz` are the others.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = np.array([t.reward for t in trajectories if t.is_valid], np.float64)
    responses = [turn.num_tokens for t in trajectories for turn in t.turns]
    logprob = np.concatenate([t.behavior_logprob[t.is_action] for t in trajectories]).astype(np.float64)
    zeros = int(np.sum(logprob == 0))
    return (
        prefixed("reward", _spread(rewards) | {"zero_frac": _mean(rewards == 0)})
        | prefixed("turns", _spread([len(t.turns) for t in trajectories], without="std"))
        | {"tokens/prompt_mean": _mean([int(np.argmax(t.is_action)) for t in trajectories])}
        | {f"tokens/response_{name}": value for name, value in _spread(responses).items()}
        | {
            "logprob/zero_count": float(zeros),
            "logprob/zero_frac": zeros / len(logprob),
            "logprob/zero_per_group": zeros / len(groups),
        }
        | {f"logprob/nz_{name}": value for name, value in _spread(logprob[logprob.nonzero()]).items()}
    )


def group_metrics(
    groups: Groups, is_trained: Bool[np.ndarray, "P G"], advantages: Float[np.ndarray, " n"], *, wanted_groups: int
) -> dict[str, float]:
    """What a step's groups have to teach: `rollout/reward/valid_mean`, `rollout/advantage/` and `analysis/`.

    A group teaches where a rollout of it is trained. The others are all right where their mean reward is above 0, all
    wrong where it is not; a group whose every tool failed is neither.

    Args:
        advantages: those that are trained, of rollouts, turns or tokens, as the method gives them.
        wanted_groups: groups that make a full batch.
    """
    rewards = [np.array([t.reward for t in group if t.is_valid], np.float64) for group in groups]
    is_flat = np.asarray(~is_trained.any(axis=1))
    is_heard = np.array([len(row) > 0 for row in rewards])
    mean = np.array([_mean(row) for row in rewards])
    counts = {"n_positive": float(np.sum(advantages > 0)), "n_negative": float(np.sum(advantages < 0))}
    return {
        "rollout/reward/valid_mean": _mean(
            np.concatenate([np.empty(0), *(row for row, flat in zip(rewards, is_flat, strict=True) if not flat)])
        ),
        **prefixed("rollout/advantage", _spread(advantages) | counts),
        "analysis/batch_completion_ratio": len(groups) / wanted_groups,
        "analysis/batch_valid_ratio": float(np.mean(~is_flat)),
        "analysis/zero_adv_groups": float(is_flat.sum()),
        "analysis/zero_adv_nonzero_reward": float(np.sum(is_flat & is_heard & (mean > ROUNDING))),
        "analysis/zero_adv_zero_reward": float(np.sum(is_flat & is_heard & (mean <= ROUNDING))),
        "analysis/reward_variance_across_groups": float(np.var(mean[is_heard])) if is_heard.any() else float("nan"),
        "analysis/mean_group_reward_spread": _mean([float(np.ptp(row)) for row in rewards if len(row)]),
    }


def training_metrics(groups: Groups, samples: Sequence[Sample], *, num_trained: int) -> dict[str, float]:
    """Sizes of a step: of all rollouts, and of the rows that the learner takes, under `training/`.

    Args:
        num_trained: trajectories that the samples are made of.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    trainable = sum(int(sample.is_action.sum()) for sample in samples)
    positions = sum(len(sample.token_ids) for sample in samples)
    return prefixed(
        "training",
        {
            "num_groups": float(len(groups)),
            "num_trajectories": float(len(trajectories)),
            "total_tokens": float(sum(len(t.token_ids) for t in trajectories)),
            "action_tokens_mean": _mean([t.num_action_tokens for t in trajectories]),
            "obs_tokens_mean": _mean([len(t.token_ids) - t.num_action_tokens for t in trajectories]),
            "num_datums": float(len(samples)),
            "datums_per_trajectory": len(samples) / num_trained if num_trained else float("nan"),
            "trainable_token_positions": float(trainable),
            "nontrainable_token_positions": float(positions - trainable),
            "trainable_token_ratio": trainable / positions if positions else float("nan"),
        },
    )


def success_metrics(groups: Groups, *, success_threshold: float, pass_k_values: Sequence[int]) -> dict[str, float]:
    """How often the rollouts of a prompt succeed, under `reward/`.

    A rollout succeeds where its task's reward reaches the threshold; one whose tool failed does not. `pass_at_k` and
    `pass_power_k` are means over prompts. A k above the group's size has no unbiased estimate and is left out.
    """
    rewards = [np.array([t.reward for t in group if t.is_valid], np.float64) for group in groups]
    heard = [row for row in rewards if len(row)]
    succeeded = [sum(t.is_valid and t.task_reward >= success_threshold - ROUNDING for t in group) for group in groups]
    size = len(groups[0])
    found = {f"{name}_within_groups": _mean([_REDUCTIONS[name](row) for row in heard]) for name in _REDUCTIONS} | {
        "rollouts_per_prompt": float(size),
        "num_prompts": float(len(groups)),
        "succeeded_rollouts": float(sum(succeeded)),
        "failed_rollouts": float(size * len(groups) - sum(succeeded)),
        "success_threshold": success_threshold,
    }
    for k in (k for k in pass_k_values if k <= size):
        found[f"pass_at_{k}"] = _mean([pass_at_k(size, count, k) for count in succeeded])
        found[f"pass_power_{k}"] = _mean([pass_power_k(size, count, k) for count in succeeded])
    return prefixed("reward", found)


def _mean(values: Values) -> float:
    """NaN where there is nothing to average: a row of metrics stores it as null."""
    return float(np.mean(values)) if len(values) else float("nan")


def _spread(values: Values, *, without: str = "") -> dict[str, float]:
    return {
        name: reduce(values) if len(values) else float("nan") for name, reduce in _REDUCTIONS.items() if name != without
    }
