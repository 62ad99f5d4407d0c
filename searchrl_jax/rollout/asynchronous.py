"""The source that plays on a thread of its own, while the learner updates."""

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.models.decoder import Params
from searchrl_jax.rollout.collect import Flight, Player, Request
from searchrl_jax.rollout.engine import Sampling
from searchrl_jax.rollout.refill import record_pass_rates
from searchrl_jax.rollout.source import Plan, Taken, staleness_metrics, tools_share
from searchrl_jax.rollout.storage import load_groups, save_groups
from searchrl_jax.rollout.trajectory import Trajectory

KEPT_FILES = 2


@dataclass
class _Group:
    """A group that has begun. `oldest` is the version with which it began, and once it is finished the oldest that
    sampled one of its tokens."""

    number: int
    task: Task
    oldest: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    finished_at: float | None = None


class AsynchronousSource:
    """Keeps the engine's slots busy across steps; see `GroupSource` for the interface.

    Terms, with S for `max_steps_off_policy`, P for the plan's prompts, v for the learner's version:

    - *Age* of a trajectory at training time: v minus the oldest version that sampled one of its tokens, time in the
      queue included. Of a group: the largest of its members. A group older than S is dropped whole and counted, and
      its prompt comes back under the same number.
    - *Look-ahead*: a group begins only while groups begun and not dropped number less than (v + S + 1) P. So of what
      is open when a group begins, it included, no more than S + 1 batches hold all, and it can be trained in time.
    - *Choice*: a batch is made of the oldest finished groups. It waits for unfinished ones only where the groups left
      behind could not all be trained in time otherwise. So the bound costs waiting, not work, and slow groups are not
      weeded out; dropping is what remains where that fails.
    - *Swap*: new weights are taken up between two chunks. The cache of every slot is then emptied and computed anew
      with the new weights before the next token is sampled; the ids stay, each with the version that sampled it.

    The worker waits for tools before it goes on where S = 0; then all is bit for bit what `SynchronousSource` gives.
    """

    def __init__(
        self,
        player: Player,
        stream: TaskStream,
        tasks: Mapping[str, Task],
        sampling: Sampling,
        plan: Plan,
        *,
        max_steps_off_policy: int,
        folder: Path,
        device: FairLock | None = None,
        frozen: Params | None = None,
    ) -> None:
        """Args:
        tasks: those of the stream, by id.
        folder: where groups that wait are saved with a checkpoint.
        device: held while the engine computes; the learner's. Without it each would slow the other, and where the mesh
            has several devices two programs with collectives could wait for each other for ever.
        frozen: arrays that no update changes, so that they need not be copied where they are among the weights.
        """
        self._player, self._stream, self._tasks, self._plan = player, stream, tasks, plan
        self._bound, self._folder = max_steps_off_policy, folder
        self._frozen = {id(x): x for x in jax.tree.leaves(frozen)}
        self._changed = threading.Condition()  # guards the stream and all below but the flight, which is the worker's
        self._flight = Flight(
            player,
            sampling,
            draw=self._draw,
            waits_for_tools=max_steps_off_policy == 0,
            on_answer=self._notify,
            device=device,
        )
        self._weights: tuple[Params, int] | None = None
        self._version = 0  # of the weights that the worker uses
        self._groups: dict[int, _Group] = {}
        self._prompts: list[tuple[int, Task]] = []  # to begin next, by number: drawn from the stream, or come back
        self._next_number = 0
        self._taken = 0
        self._dropped = 0
        self._holds = 0
        self._is_resting = True
        self._is_closing = False
        self._error: BaseException | None = None
        self._seen = (time.monotonic(), 0, 0, 0)
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)

    # ------------------------------------------------------------------ the learner's side

    def take(self, params: Params, version: int) -> Taken:
        """The next batch, whose age is at most the bound. A copy of `params` is handed to the worker.

        Raises:
            BaseException: what ended the worker.
        """
        copied = jax.tree.map(lambda x: x if id(x) in self._frozen else jnp.copy(x), params)
        with self._changed:
            self._weights = (copied, version)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
            self._raise_error()
            while (batch := self._choose(version)) is None:
                self._changed.wait()
                self._raise_error()
            self._taken += len(batch)
            for group in batch:
                del self._groups[group.number]
            groups = [list(group.members.values()) for group in batch]
            record_pass_rates(self._stream, groups, threshold=self._plan.pass_threshold)
            now = time.monotonic()
            metrics = self._metrics(batch, now)
        return Taken([group.task for group in batch], groups, staleness_metrics(groups, version, self._bound) | metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts the worker rests and the slots are free; tools that run go on."""
        self._hold()
        engine, began = self._player.engine, time.monotonic()
        aside = engine.set_aside()
        try:
            yield
        finally:
            engine.put_back(aside)
            self._flight.wind_clocks(began)
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def save(self, step: int) -> dict[str, Any]:
        """Saves the finished groups that wait, and names the prompts of all others that were drawn."""
        with self._changed:
            self._raise_error()
            finished = {n: list(group.members.values()) for n, group in self._groups.items() if group.finished_at}
            began = [(n, group.task) for n, group in self._groups.items() if n not in finished]
            to_begin = sorted([*began, *self._prompts], key=lambda pair: pair[0])
            state = {
                "stream": self._stream.state(),
                "next_number": self._next_number,
                "taken": self._taken,
                "to_begin": [[number, task.task_id] for number, task in to_begin],
            }
        save_groups(self._file(step), finished)
        for path in sorted(self._folder.glob("step_*.npz"))[:-KEPT_FILES]:
            path.unlink()
        return state

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """The finished groups wait as they did; those that were in flight are played anew."""
        self._stream.restore(state["stream"])
        self._next_number, self._taken = state["next_number"], state["taken"]
        self._prompts = [(number, self._tasks[task_id]) for number, task_id in state["to_begin"]]
        now = time.monotonic()
        for number, played in load_groups(self._file(step)).items():
            group = _Group(number, self._tasks[played[0].task_id], 0)
            self._finish(group, {trajectory.uid: trajectory for trajectory in played}, now)
            self._groups[number] = group
        # A file past the checkpoint is of a step that will be taken again.
        for path in self._folder.glob("step_*.npz"):
            if path > self._file(step):
                path.unlink()

    def close(self) -> None:
        """Ends the worker after the chunk that it is at, and frees the slots."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _file(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.npz"

    def _choose(self, version: int) -> list[_Group] | None:
        """The groups to train now, in the order of their numbers; None where there is something to wait for."""
        for group in list(self._groups.values()):
            if group.finished_at and version - group.oldest > self._bound:
                del self._groups[group.number]
                bisect.insort(self._prompts, (group.number, group.task), key=lambda pair: pair[0])
                self._dropped += 1
                self._changed.notify_all()
        size = self._plan.prompts
        by_age = sorted(self._groups.values(), key=lambda group: (group.oldest, group.number))
        finished = [group for group in by_age if group.finished_at]
        if len(finished) < size:
            return None
        batch = finished[:size]
        left = [group for group in by_age if group not in batch]
        # The i-th oldest of those left is trained i // P steps after the next at best.
        is_late = any(group.oldest + self._bound < version + 1 + i // size for i, group in enumerate(left))
        if is_late and len(finished) < len(by_age):
            return None
        return sorted(batch, key=lambda group: group.number)

    def _metrics(self, batch: Sequence[_Group], now: float) -> dict[str, float]:
        """What came since the last batch."""
        player = self._player
        waits = [now - group.finished_at for group in batch if group.finished_at]
        seen = (now, self._dropped, player.retries, player.sampled_tokens)
        seconds, dropped, retries, tokens = (new - old for new, old in zip(seen, self._seen, strict=True))
        self._seen = seen
        return {
            "dropped_groups": float(dropped),
            "retries": float(retries),
            "timing_s/queue_wait": float(np.mean(waits)),
            "timing_share/tools": tools_share([each for group in batch for each in group.members.values()]),
            "throughput/rollout": tokens / max(seconds, 1e-9),
        }

    def _hold(self) -> None:
        """Waits until the worker rests; it goes on when `_holds` is 0 again."""
        with self._changed:
            self._holds += 1
            while not self._is_resting:
                self._changed.wait()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ the worker's side

    def _work(self) -> None:
        try:
            while (weights := self._await_work()) is not None:
                params, version = weights
                if version != self._version:
                    self._player.engine.forget()
                    self._version = version
                finished = self._flight.tick(params, version)
                with self._changed:
                    for trajectory in finished:
                        self._deliver(trajectory)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            self._flight.abandon()
            with self._changed:
                self._is_resting = True
                self._changed.notify_all()

    def _await_work(self) -> tuple[Params, int] | None:
        """The weights to go on with, as soon as there is something to do; None to end."""
        with self._changed:
            while not self._is_closing and (self._holds or not self._has_work()):
                self._is_resting = True
                self._changed.notify_all()
                self._changed.wait()
            self._is_resting = False
            return None if self._is_closing else self._weights

    def _has_work(self) -> bool:
        return self._weights is not None and (
            self._flight.can_advance or bool(self._flight.vacant and self._may_begin(self._weights[1]))
        )

    def _may_begin(self, version: int) -> bool:
        """Whether look-ahead allows one more group, and there is one."""
        room = (version + self._bound + 1) * self._plan.prompts - self._taken - len(self._groups)
        is_any_left = bool(self._prompts) or self._next_number < self._plan.steps * self._plan.prompts
        return room > 0 and is_any_left

    def _draw(self, count: int) -> list[Request]:
        """The rollouts of as many further groups as fill `count` slots and look-ahead allows."""
        requests: list[Request] = []
        with self._changed:
            while len(requests) < count and self._may_begin(self._version):
                if not self._prompts:
                    drawn = self._stream.next_batch()
                    self._prompts += enumerate(drawn, self._next_number)
                    self._next_number += len(drawn)
                number, task = self._prompts.pop(0)
                self._groups[number] = _Group(number, task, self._version)
                requests += self._plan.requests(number, task)
        return requests

    def _deliver(self, trajectory: Trajectory) -> None:
        group = self._groups[self._plan.number_of(trajectory.uid)]
        group.members[trajectory.uid] = trajectory
        if len(group.members) == self._plan.group_size:
            self._finish(group, group.members, time.monotonic())

    def _finish(self, group: _Group, members: Mapping[int, Trajectory], now: float) -> None:
        group.members = dict(sorted(members.items()))
        group.oldest = min(trajectory.oldest_version for trajectory in members.values())
        group.finished_at = now

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
