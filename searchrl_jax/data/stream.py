"""The order in which training meets its tasks: shuffled anew each epoch, and resumable at any point."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from searchrl_jax.data.schema import Task


class TaskStream:
    """Batches of tasks without end, each epoch in its own seeded order.

    The order of epoch e is a shuffle of the sorted task ids by numpy's generator keyed with (seed, e): it depends on
    the seed, the epoch and the *names* of the tasks, not on the list that they came in. An epoch holds
    `len(tasks) // batch_size` batches; the remainder is dropped, so that a batch never straddles two epochs and no task
    comes twice in one. Which tasks are dropped changes with the shuffle, so none is left out for good.

    Args:
        tasks: with unique ids, at least `batch_size` of them.
        batch_size: tasks in a batch, at least 1.
        seed: at least 0.

    Raises:
        ValueError: one of these conditions is broken.
    """

    def __init__(self, tasks: Sequence[Task], batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self._tasks = {task.task_id: task for task in tasks}
        if len(self._tasks) < len(tasks):
            repeated = Counter(task.task_id for task in tasks).most_common(1)[0][0]
            raise ValueError(f"task id {repeated!r} occurs twice; ids must be unique")
        if len(self._tasks) < batch_size:
            count = len(self._tasks)
            raise ValueError(f"{count} tasks don't fill one batch of {batch_size}; lower batch_size or add tasks")
        self._names = sorted(self._tasks)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._batch = 0
        self._order = self._shuffled()

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one epoch; the remainder of the tasks is dropped."""
        return len(self._names) // self._batch_size

    def _shuffled(self) -> list[str]:
        generator = np.random.default_rng((self._seed, self._epoch))
        return [self._names[index] for index in generator.permutation(len(self._names))]

    def _fingerprint(self) -> str:
        return hashlib.sha256("\x1f".join(self._names).encode()).hexdigest()[:16]

    def next_batch(self) -> list[Task]:
        """The next `batch_size` tasks; after an epoch's last batch the next epoch begins."""
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
            self._order = self._shuffled()
        start = self._batch * self._batch_size
        self._batch += 1
        return [self._tasks[name] for name in self._order[start : start + self._batch_size]]

    def state(self) -> dict[str, int | str]:
        """Where the stream stands, as JSON: what `next_batch` gives after `restore` is what it would give now.

        `epoch` and `batch` (batches already given out in it) are the position; the rest tells other streams apart.
        """
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self._seed,
            "batch_size": self._batch_size,
            "tasks": self._fingerprint(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `state` returned, in this process or another.

        Raises:
            ValueError: a state of other tasks, another seed or another batch size, or one that is not a state.
        """
        expected = self.state()
        if set(state) != set(expected):
            raise ValueError(f"a stream state has the fields {sorted(expected)}, got {sorted(state)}")
        for name, meaning in (("tasks", "other tasks"), ("seed", "another seed"), ("batch_size", "another batch size")):
            if state[name] != expected[name]:
                raise ValueError(
                    f"this state is of {meaning}: {name} is {state[name]!r} there and {expected[name]!r} here; "
                    "restore it into a stream built as it was, or start anew"
                )
        epoch, batch = state["epoch"], state["batch"]
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be an integer of at least 0, got {epoch!r}")
        if type(batch) is not int or not 0 <= batch <= self.batches_per_epoch:
            raise ValueError(f"batch must be an integer from 0 to {self.batches_per_epoch}, got {batch!r}")
        self._epoch, self._batch = epoch, batch
        self._order = self._shuffled()
