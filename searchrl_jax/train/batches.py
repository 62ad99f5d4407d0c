"""A step's groups: those of a batch of prompts, and of the fresh prompts that make up for groups without variance."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.rl.advantages import zero_variance_groups
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.train.learn import Groups

Play = Callable[[Sequence[Task], int], list[list[Trajectory]]]


def play_batch(stream: TaskStream, play: Play, *, refills: int) -> tuple[list[Task], list[list[Trajectory]]]:
    """All prompts that were played, and their groups, in order.

    As many groups have variance as the batch has prompts, where `refills` tries suffice: each try plays one fresh
    prompt for each group still missing. A group is played and kept as a whole; those without variance are among the
    groups, for the metrics to be of all that the policy did, and the learner leaves them out.

    Args:
        play: from prompts and the number of the try (0 for the batch itself) to their groups.
        refills: tries at most; 0 for none.
    """
    tasks = stream.next_batch()
    wanted = len(tasks)
    groups = play(tasks, 0)
    for attempt in range(1, refills + 1):
        missing = wanted - int(np.sum(~has_no_variance(groups)))
        fresh = stream.more(missing, taken=tasks)
        if not fresh:
            break
        groups = groups + play(fresh, attempt)
        tasks = tasks + fresh
    return tasks, groups


def has_no_variance(groups: Groups) -> np.ndarray:
    """Whether the rollouts of each group that have a reward have all the same; also where fewer than two have one."""
    rewards = np.array([[np.nan if t.reward is None else t.reward for t in group] for group in groups], np.float32)
    return np.asarray(zero_variance_groups(jnp.asarray(rewards)))


def record_pass_rates(stream: TaskStream, groups: Groups, *, threshold: float) -> None:
    """Tells the stream how often each prompt was passed; a group whose every tool failed says nothing.

    Args:
        threshold: reward from which a rollout has passed.
    """
    for group in groups:
        rewards = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        if rewards:
            stream.record(group[0].task_id, sum(reward >= threshold for reward in rewards) / len(rewards))
