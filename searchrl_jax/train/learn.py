"""From groups of trajectories to what the learner trains on."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from searchrl_jax.config.schema import RLConfig
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
    """The rows of the trained rollouts, each up to its last action token, with the trajectory's advantage on every one.

    A trajectory of several rows counts as one of the same tokens in one row would: each of its action tokens is in one
    of them.

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
            samples += [
                Sample(
                    token_ids=trajectory.token_ids[row],
                    is_action=trajectory.is_action[row],
                    behavior_logprob=trajectory.behavior_logprob[row],
                    advantage=np.full(row.stop - row.start, advantages[p, g], np.float32),
                )
                for row in trajectory.rows
            ]
    return samples


def split_minibatches(samples: Sequence[Sample], count: int, rng: np.random.Generator) -> list[list[Sample]]:
    """`samples` dealt at random into at most `count` minibatches of nearly equal size, none empty."""
    order = rng.permutation(len(samples))
    return [[samples[i] for i in part] for part in np.array_split(order, count) if len(part)]
