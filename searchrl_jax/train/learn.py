"""From groups of trajectories to what the learner trains on, and to the metrics of a step."""

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.env.rewards import STATUSES, SUBMITTED
from searchrl_jax.rl.advantages import ADVANTAGES, zero_variance_groups
from searchrl_jax.rollout.batch import Sample
from searchrl_jax.rollout.trajectory import Trajectory

Groups = Sequence[Sequence[Trajectory]]


def group_rewards(groups: Groups) -> tuple[Float[np.ndarray, "P G"], Bool[np.ndarray, "P G"]]:
    """Rewards, and which rollouts count. A rollout whose tool failed has no reward: 0 stands in its place, masked."""
    rewards = np.array([[t.reward if t.reward is not None else 0.0 for t in group] for group in groups], np.float32)
    return rewards, np.array([[t.is_valid for t in group] for group in groups], bool)


def group_advantages(groups: Groups, config: RLConfig) -> tuple[Float[np.ndarray, "P G"], Bool[np.ndarray, "P G"]]:
    """Advantages of the rollouts, and which of them are trained on.

    Left out are rollouts whose tool failed and groups without variance, which have nothing to say about the policy.
    """
    rewards, is_valid = group_rewards(groups)
    is_flat = np.asarray(zero_variance_groups(jnp.asarray(rewards), jnp.asarray(is_valid)))
    is_trained = is_valid & ~is_flat[:, None]
    tokens = np.array([[t.num_action_tokens for t in group] for group in groups], np.int32)
    advantages = ADVANTAGES[config.advantage_method](
        jnp.asarray(rewards),
        is_valid=jnp.asarray(is_trained),
        action_tokens=jnp.asarray(tokens),
        normalize=config.advantage_normalization,
    )
    return np.asarray(advantages), is_trained


def samples_of(
    groups: Groups, advantages: Float[np.ndarray, "P G"], is_trained: Bool[np.ndarray, "P G"]
) -> list[Sample]:
    """The trained rollouts, each up to its last action token, with the trajectory's advantage on every action token.

    Raises:
        ValueError: a rollout has no behaviour log-probabilities; without them nothing would be learnt, silently.
    """
    samples = []
    for p, group in enumerate(groups):
        for g, trajectory in enumerate(group):
            if not is_trained[p, g]:
                continue
            if not np.any(trajectory.behavior_logprob[trajectory.is_action]):
                raise ValueError(
                    f"rollout {trajectory.uid} of task {trajectory.task_id!r}: expected the log-probabilities of its "
                    "action tokens, got zeros; sample it with the engine"
                )
            end = int(np.flatnonzero(trajectory.is_action)[-1]) + 1
            samples.append(
                Sample(
                    token_ids=trajectory.token_ids[:end],
                    is_action=trajectory.is_action[:end],
                    behavior_logprob=trajectory.behavior_logprob[:end],
                    advantage=np.full(end, advantages[p, g], np.float32),
                )
            )
    return samples


def split_minibatches(samples: Sequence[Sample], count: int, rng: np.random.Generator) -> list[list[Sample]]:
    """`samples` dealt at random into at most `count` minibatches of nearly equal size, none empty."""
    order = rng.permutation(len(samples))
    return [[samples[i] for i in part] for part in np.array_split(order, count) if len(part)]


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What trajectories say of the policy that sampled them, under the published service's names where it has one.

    nDCG@10 counts a failed rollout as 0; one whose tool failed counts in the failure rates alone.
    """
    count = len(trajectories)
    valid = [t for t in trajectories if t.is_valid]
    rewards = np.array([t.reward for t in valid], np.float64)
    submitted = [t for t in valid if t.is_submitted]
    turns = np.array([len(t.turns) for t in trajectories])
    responses = np.array([t.num_action_tokens for t in trajectories])
    calls = [turn for t in trajectories for turn in t.turns]
    logprobs = np.concatenate([t.behavior_logprob[t.is_action] for t in trajectories])
    statuses = Counter(t.status for t in trajectories)
    metrics = {
        "reward": float(rewards.mean()) if len(valid) else float("nan"),
        "ndcg@10": float(np.mean([t.ndcg for t in valid])) if valid else float("nan"),
        "ndcg@10_completed": float(np.mean([t.ndcg for t in submitted])) if submitted else float("nan"),
        "failure_rate": 1 - statuses[SUBMITTED] / count,
        "malformed_rate": float(np.mean([turn.is_malformed for turn in calls])),
        "searches": sum(turn.tool is not None for turn in calls) / count,
        "turns": float(turns.mean()),
        "action_tokens": float(responses.mean()),
        "tokens": float(np.mean([len(t.token_ids) for t in trajectories])),
        "logprob/mean": float(logprobs.mean()),
        "logprob/min": float(logprobs.min()),
        "tokens/response_std": float(responses.std()),
        "tokens/response_max": float(responses.max()),
        "turns_max": float(turns.max()),
    }
    if len(valid):
        metrics |= {
            "reward_std": float(rewards.std()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "reward_zero_frac": float(np.mean(rewards == 0)),
        }
    return metrics | {f"failures/{status}": statuses[status] / count for status in STATUSES if status != SUBMITTED}


def group_metrics(groups: Groups, advantages: Float[np.ndarray, "P G"], is_trained: Bool[np.ndarray, "P G"]) -> dict:
    """What a step's groups have to teach."""
    rewards, is_valid = group_rewards(groups)
    is_flat = ~is_trained.any(axis=1)
    spread = np.where(is_valid, rewards, -np.inf).max(axis=1) - np.where(is_valid, rewards, np.inf).min(axis=1)
    trained = advantages[is_trained]
    return {
        "num_groups": float(len(groups)),
        "num_trajectories": float(is_valid.size),
        "zero_adv_groups": float(is_flat.sum()),
        "masked_rollouts": float((~is_valid).sum()),
        "group_reward_spread": float(spread[is_valid.any(axis=1)].mean()) if is_valid.any() else 0.0,
        "advantage_std": float(trained.std()) if trained.size else 0.0,
    }
