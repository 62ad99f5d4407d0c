"""A step's groups: those of a batch of prompts, and of the fresh prompts that make up for groups without a lesson."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool

from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.rollout.trajectory import Trajectory

Play = Callable[[Sequence[Task], int], list[list[Trajectory]]]
Judge = Callable[[Sequence[Sequence[Trajectory]]], Bool[np.ndarray, " P"]]


def play_batch(
    stream: TaskStream, play: Play, *, refills: int, teaches: Judge
) -> tuple[list[Task], list[list[Trajectory]]]:
    """All prompts that were played, and their groups, in order.

    As many groups teach something as the batch has prompts, where `refills` tries suffice: each try plays one fresh
    prompt for each group still missing. A group is played and kept as a whole; those that teach nothing are among the
    groups, for the metrics to be of all that the policy did, and the learner leaves them out.

    Args:
        play: from prompts and the number of the try (0 for the batch itself) to their groups.
        refills: tries at most; 0 for none.
        teaches: which of the groups the learner will train on. Not called without refills.
    """
    tasks = stream.next_batch()
    wanted = len(tasks)
    groups = play(tasks, 0)
    for attempt in range(1, refills + 1):
        missing = wanted - int(np.sum(teaches(groups)))
        fresh = stream.more(missing, taken=tasks)
        if not fresh:
            break
        groups = groups + play(fresh, attempt)
        tasks = tasks + fresh
    return tasks, groups


def record_pass_rates(stream: TaskStream, groups: Sequence[Sequence[Trajectory]], *, threshold: float) -> None:
    """Tells the stream how often each prompt was passed; a group whose every tool failed says nothing.

    Args:
        threshold: reward from which a rollout has passed.
    """
    for group in groups:
        rewards = [trajectory.task_reward for trajectory in group if trajectory.is_valid]
        if rewards:
            stream.record(group[0].task_id, sum(reward >= threshold for reward in rewards) / len(rewards))
