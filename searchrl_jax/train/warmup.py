"""Behaviour cloning: the base agent, from a demonstrator of mixed quality."""

from collections.abc import Sequence

import numpy as np
import optax

from searchrl_jax.config.schema import WarmupConfig
from searchrl_jax.data.schema import Task
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstration, Demonstrator
from searchrl_jax.rollout.batch import Rows, RowShape, Sample, pack


def shares_of(config: WarmupConfig) -> dict[str, float]:
    """Probability of each style of demonstration; what is not named is good."""
    flawed = {LAZY: config.lazy, RAMBLING: config.rambling, OVERLONG: config.overlong}
    return {GOOD: 1.0 - sum(flawed.values()), **flawed}


def make_warmup_optimizer(config: WarmupConfig) -> optax.GradientTransformation:
    """AdamW with a short linear warm-up and cosine decay to a twentieth of the peak learning rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(50, config.steps // 10 + 1),
        decay_steps=max(config.steps, 2),
        end_value=config.learning_rate / 20,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


class DemonstrationStream:
    """Batches of demonstrations; the n-th demonstration is a function of (seed, n) alone.

    So the whole state of the stream is the number of the next one.
    """

    def __init__(
        self, demonstrator: Demonstrator, tasks: Sequence[Task], seed: int, shapes: Sequence[RowShape]
    ) -> None:
        """Args:
        tasks: training tasks; each demonstration is of one drawn at random.
        shapes: of micro-batches; an update takes one of the first shape, and more where a demonstration needs another.
        """
        self.demonstrator, self.tasks, self.seed, self.shapes = demonstrator, tasks, seed, shapes
        self.next = 0

    def demonstration(self, n: int) -> Demonstration:
        """The n-th."""
        rng = np.random.default_rng([self.seed, n])
        return self.demonstrator.demonstrate(self.tasks[int(rng.integers(len(self.tasks)))], rng)

    def next_batch(self) -> list[Rows]:
        """As many further demonstrations as fit, in order, into the rows of the first shape; the next one waits."""
        shape = self.shapes[0]
        free = [[shape.length, shape.actions] for _ in range(shape.rows)]
        samples: list[Sample] = []
        while True:
            demo = self.demonstration(self.next)
            length, actions = len(demo.token_ids), int(demo.is_action.sum())
            fitting = [row for row in free if length <= row[0] and actions <= row[1]]
            is_large = length > shape.length or actions > shape.actions
            if not fitting and not is_large:
                return pack(samples, self.shapes)
            if fitting:
                fitting[0][0] -= length
                fitting[0][1] -= actions
            zeros = np.zeros(length, np.float32)
            samples.append(Sample(demo.token_ids, demo.is_action, zeros, zeros))
            self.next += 1
