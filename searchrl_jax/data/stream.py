"""The order in which training meets its tasks: by epochs, by weight of datasets, by pass rate; resumable anywhere."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from searchrl_jax.data.schema import Task

# A pass rate is a running mean that gives the last group this weight: old ones are of an older policy.
RATE_STEP = 0.5
# Least weight of a task in the curriculum, where a rate of 1/2 has weight 1: a task is never given up for good.
LEAST_WEIGHT = 0.05


class TaskStream:
    """Batches of tasks without end, each epoch in its own seeded order.

    The order of epoch e is a shuffle of the sorted task ids by numpy's generator keyed with (seed, e): it depends on
    the seed, the epoch and the *names* of the tasks, not on the list that they came in. An epoch holds
    `len(tasks) // batch_size` batches; the remainder is dropped, so that a batch never straddles two epochs and no task
    comes twice in one. Which tasks are dropped changes with the shuffle, so none is left out for good.

    With `weights` each dataset has epochs of its own, keyed with its name too. The next place of a batch goes to the
    dataset d that is furthest behind its share,

        argmax_d  weight_d / sum(weights) * (places given + 1) - places given to d

    among those with a task that is not in the batch yet. So no dataset is ever ahead of its share by a whole task,
    except where others have run out of tasks.

    With `curriculum` there are no epochs within a dataset: a batch draws without replacement with probabilities in
    proportion to

        max(4 p (1 - p), 0.05)

    where p is the measured pass rate of the task, 1/2 until `record` has told one: a task that is always or never
    passed teaches nothing, one passed half of the time the most.

    Args:
        tasks: with unique ids, at least `batch_size` of them.
        batch_size: tasks in a batch, at least 1.
        seed: at least 0.
        weights: of each dataset, at least 0; tasks of weight 0 are never given out. None mixes nothing.
        field: metadata field that names a task's dataset.
        curriculum: choose by pass rate.

    Raises:
        ValueError: one of these conditions is broken, or the datasets of the tasks and of `weights` are not the same.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        batch_size: int,
        seed: int,
        *,
        weights: Mapping[str, float] | None = None,
        field: str = "dataset",
        curriculum: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self._tasks = {task.task_id: task for task in tasks}
        if len(self._tasks) < len(tasks):
            repeated = Counter(task.task_id for task in tasks).most_common(1)[0][0]
            raise ValueError(f"task id {repeated!r} occurs twice; ids must be unique")
        if weights is None:
            datasets, self._shares = {"": sorted(self._tasks)}, {"": 1.0}
        else:
            datasets = _by_dataset(tasks, field)
            self._shares = _shares(weights, datasets, field)
        self._pools = {
            name: _Pool(datasets[name], (seed,), () if weights is None else (_word(name),))
            for name in sorted(self._shares)
        }
        self._size = sum(len(pool.names) for pool in self._pools.values())
        if self._size < batch_size:
            raise ValueError(
                f"{self._size} tasks don't fill one batch of {batch_size}; "
                "lower batch.global_batch_size or add training tasks"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._curriculum = curriculum
        self._draws = 0
        self._rates: dict[str, float] = {}

    @property
    def batches_per_epoch(self) -> int:
        """Batches that hold as many tasks as there are; the remainder of the tasks is dropped."""
        return self._size // self._batch_size

    def next_batch(self) -> list[Task]:
        """The next `batch_size` tasks, no two the same."""
        return self.more(self._batch_size)

    def more(self, count: int, taken: Collection[Task] = ()) -> list[Task]:
        """The next `count` tasks, none of `taken`; fewer where there are not so many.

        For a batch that has prompts to make up for: `taken` are those that it has had. A dataset begins its next epoch
        where what is left of this one does not suffice.
        """
        names = {task.task_id for task in taken}
        chosen = []
        for dataset, places in self._places(count, names).items():
            pool = self._pools[dataset]
            pool.given += places
            chosen += self._likely(pool, places, names) if self._curriculum else pool.take(places, names)
        self._draws += 1
        return [self._tasks[name] for name in chosen]

    def record(self, task_id: str, passed: float) -> None:
        """Tells the share of a task's rollouts that passed. Read by the curriculum alone; without one, not kept.

            p <- p + 0.5 (passed - p),    beginning at p = 1/2

        Raises:
            ValueError: the task is not of this stream, or `passed` is not in [0, 1].
        """
        if task_id not in self._tasks or not 0 <= passed <= 1:
            raise ValueError(
                f"expected a task of this stream and a share in [0, 1], got {task_id!r} and {passed}; record what the "
                "stream gave out"
            )
        if self._curriculum:
            rate = self._rates.get(task_id, 0.5)
            self._rates[task_id] = rate + RATE_STEP * (passed - rate)

    def pass_rate(self, task_id: str) -> float:
        """The measured pass rate of a task; 1/2 where none was measured."""
        return self._rates.get(task_id, 0.5)

    def _places(self, count: int, taken: Collection[str]) -> dict[str, int]:
        """How many of `count` places each dataset gets."""
        room = {name: len(pool.names) - sum(n in taken for n in pool.names) for name, pool in self._pools.items()}
        places = dict.fromkeys(self._pools, 0)
        total = sum(pool.given for pool in self._pools.values())
        for number in range(min(count, sum(room.values()))):
            open_ = [name for name in self._pools if places[name] < room[name]]
            behind = {
                name: self._shares[name] * (total + number + 1) - self._pools[name].given - places[name]
                for name in open_
            }
            places[max(open_, key=behind.__getitem__)] += 1
        return places

    def _likely(self, pool: "_Pool", count: int, taken: Collection[str]) -> list[str]:
        """`count` of the pool's tasks, drawn one after the other in proportion to their weights.

        The largest of log(weight) + Gumbel noise are such a draw (Efraimidis & Spirakis 2006; Kool et al. 2019,
        arXiv:1903.06059).
        """
        names = [name for name in pool.names if name not in taken]
        rates = np.array([self.pass_rate(name) for name in names])
        rng = np.random.default_rng((self._seed, self._draws, 1, *pool.key))
        scores = np.log(np.maximum(4 * rates * (1 - rates), LEAST_WEIGHT)) + rng.gumbel(size=len(names))
        return [names[index] for index in np.argsort(-scores, kind="stable")[:count]]

    def _fingerprint(self) -> str:
        words = [*sorted(self._tasks), *(f"{name}={share!r}" for name, share in self._shares.items() if name)]
        return hashlib.sha256("\x1f".join(words).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON: what `next_batch` gives after `restore` is what it would give now.

        `pools` (by dataset: epoch, position in it, tasks given out), `draws` and `rates` are the position; the rest
        tells other streams apart.
        """
        return {
            "pools": {name: [pool.epoch, pool.position, pool.given] for name, pool in self._pools.items()},
            "draws": self._draws,
            "rates": dict(self._rates),
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
        pools, draws, rates = state["pools"], state["draws"], state["rates"]
        is_whole = (
            set(pools) == set(self._pools)
            and all(
                len(at) == 3 and all(type(x) is int and x >= 0 for x in at) and at[1] <= len(self._pools[name].names)
                for name, at in pools.items()
            )
            and type(draws) is int
            and draws >= 0
            and all(name in self._tasks and 0 <= rate <= 1 for name, rate in rates.items())
        )
        if not is_whole:
            raise ValueError(
                "expected the three counts of each dataset, draws of at least 0 and rates of our tasks in [0, 1], got "
                f"pools {pools!r}, draws {draws!r} and {len(rates)} rates; the state is damaged, restore another"
            )
        for name, (epoch, position, given) in pools.items():
            self._pools[name].move(epoch, position, given)
        self._draws, self._rates = draws, dict(rates)


class _Pool:
    """The tasks of one dataset in the order of its epoch, and how far that has got."""

    def __init__(self, names: Sequence[str], seed: tuple[int, ...], key: tuple[int, ...]) -> None:
        self.names, self.key, self._seed = sorted(names), key, seed
        self.move(0, 0, 0)

    def move(self, epoch: int, position: int, given: int) -> None:
        generator = np.random.default_rng((*self._seed, epoch, *self.key))
        self._order = [self.names[index] for index in generator.permutation(len(self.names))]
        self.epoch, self.position, self.given = epoch, position, given

    def take(self, count: int, taken: Collection[str]) -> list[str]:
        """The next `count` names that are not taken; there must be so many."""
        if sum(name not in taken for name in self._order[self.position :]) < count:
            self.move(self.epoch + 1, 0, self.given)
        chosen: list[str] = []
        while len(chosen) < count:
            name = self._order[self.position]
            self.position += 1
            if name not in taken:
                chosen.append(name)
        return chosen


def _by_dataset(tasks: Sequence[Task], field: str) -> dict[str, list[str]]:
    datasets: dict[str, list[str]] = {}
    for task in tasks:
        dataset = task.metadata.get(field)
        if not isinstance(dataset, str) or not dataset:
            raise ValueError(
                f"task {task.task_id!r}: expected the name of its dataset in the metadata field {field!r}, got "
                f"{dataset!r}; name it, or mix nothing"
            )
        datasets.setdefault(dataset, []).append(task.task_id)
    return datasets


def _shares(weights: Mapping[str, float], datasets: Mapping[str, Sequence[str]], field: str) -> dict[str, float]:
    """The share of each dataset that has one."""
    if set(weights) != set(datasets):
        raise ValueError(
            f"expected a weight for each {field} of the tasks, {', '.join(sorted(datasets))}, got weights for "
            f"{', '.join(sorted(weights)) or 'none'}; give one that is to be left out weight 0"
        )
    total = math.fsum(weights.values())
    if min(weights.values()) < 0 or not 0 < total < math.inf:
        raise ValueError(f"expected weights of at least 0, not all 0, got {dict(weights)}; correct them")
    return {name: weight / total for name, weight in sorted(weights.items()) if weight > 0}


def _word(name: str) -> int:
    """The name as part of a generator's key."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
