"""Where the learner gets its groups from: one interface, and the source that plays when it is asked."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.models.decoder import Params
from searchrl_jax.rollout.collect import Player, Request
from searchrl_jax.rollout.engine import Sampling
from searchrl_jax.rollout.refill import Judge, play_batch, record_pass_rates
from searchrl_jax.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Plan:
    """What a run takes from its source: `steps` batches of `prompts` groups of `group_size` rollouts.

    Groups are numbered in the order of the task stream, and keep their number for life. Rollout g of group n has the
    uid n * group_size + g, so that a group played again draws from the same random numbers.

    Attributes:
        pass_threshold: reward from which a rollout has passed; the stream is told each trained prompt's share of them.
    """

    prompts: int
    group_size: int
    steps: int
    pass_threshold: float = 0.5

    def requests(self, number: int, task: Task) -> list[Request]:
        """The rollouts of group `number`."""
        return [Request(number * self.group_size + g, task) for g in range(self.group_size)]

    def number_of(self, uid: int) -> int:
        """The group of the rollout `uid`."""
        return uid // self.group_size


@dataclass(frozen=True)
class Taken:
    """One step's groups in the order of their numbers, their tasks, and what it took to get them."""

    tasks: Sequence[Task]
    groups: Sequence[Sequence[Trajectory]]
    metrics: Mapping[str, float]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All rollouts, group after group."""
        return [trajectory for group in self.groups for trajectory in group]


class GroupSource(Protocol):
    """Gives groups to the learner, and tells a checkpoint what it needs to go on."""

    def take(self, params: Params, version: int) -> Taken:
        """The next batch of groups. The stream has been told how often each of their prompts was passed.

        Args:
            params: the learner's weights after `version` training steps; read until the call returns, not after.
        """
        ...

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts the engine is free for others."""
        ...

    def save(self, step: int) -> dict[str, Any]:
        """What `restore` needs, as JSON; arrays go to a file of their own. Called right before the checkpoint `step`
        is written."""
        ...

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Stands where the source stood that saved `state` with the checkpoint `step`."""
        ...

    def close(self) -> None:
        """Ends all work. May be called twice."""
        ...


class SynchronousSource:
    """Plays a batch when it is asked for one: no trajectory is ever older than the weights that it trains.

    With `refills` a step has more than the plan's prompts, and numbers for as many as all of its tries may play.
    """

    def __init__(
        self,
        player: Player,
        stream: TaskStream,
        sampling: Sampling,
        plan: Plan,
        *,
        refills: int = 0,
        teaches: Judge = lambda groups: np.ones(len(groups), bool),
    ) -> None:
        """Args: `refills` and `teaches` as in `play_batch`."""
        self._player, self._stream, self._sampling, self._plan = player, stream, sampling, plan
        self._refills, self._teaches = refills, teaches

    def take(self, params: Params, version: int) -> Taken:
        """See `GroupSource`."""
        player, plan = self._player, self._plan
        began, retries, sampled = time.perf_counter(), player.retries, player.sampled_tokens

        def play(tasks: Sequence[Task], attempt: int) -> list[list[Trajectory]]:
            first = (version * (1 + self._refills) + attempt) * plan.prompts
            requests = [each for n, task in enumerate(tasks, first) for each in plan.requests(n, task)]
            played = player.play(params, requests, self._sampling, policy_version=version)
            return [played[i : i + plan.group_size] for i in range(0, len(played), plan.group_size)]

        tasks, groups = play_batch(self._stream, play, refills=self._refills, teaches=self._teaches)
        record_pass_rates(self._stream, groups, threshold=plan.pass_threshold)
        seconds = time.perf_counter() - began
        metrics = staleness_metrics(groups, version, 0) | {
            "dropped_groups": 0.0,
            "retries": float(player.retries - retries),
            "timing_s/queue_wait": 0.0,
            "timing_share/tools": tools_share([each for group in groups for each in group]),
            "throughput/rollout": (player.sampled_tokens - sampled) / seconds,
        }
        return Taken(tasks, groups, metrics)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """See `GroupSource`: between two batches the engine is free anyway."""
        return contextlib.nullcontext()

    def save(self, step: int) -> dict[str, Any]:
        """See `GroupSource`."""
        return {"stream": self._stream.state()}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """See `GroupSource`."""
        self._stream.restore(state["stream"])

    def close(self) -> None:
        """See `GroupSource`."""


def staleness_metrics(groups: Sequence[Sequence[Trajectory]], version: int, bound: int) -> dict[str, float]:
    """The ages of trajectories at training time: `staleness/n` is the share of age n, for n from 0 to `bound`.

        age = learner version - oldest version that sampled a token

    Args:
        version: training steps taken so far.
    """
    ages = np.array([version - trajectory.oldest_version for group in groups for trajectory in group])
    shares = {f"staleness/{age}": float(np.mean(ages == age)) for age in range(bound + 1)}
    return shares | {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def tools_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of the rollouts' lives that their tools took."""
    lives = sum(trajectory.seconds for trajectory in trajectories)
    return sum(turn.seconds for trajectory in trajectories for turn in trajectory.turns) / lives if lives else 0.0
