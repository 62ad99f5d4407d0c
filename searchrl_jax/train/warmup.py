"""Behaviour cloning: the base agent, from a demonstrator of mixed quality."""

from collections.abc import Sequence

import numpy as np
import optax

from searchrl_jax.config.schema import WarmupConfig
from searchrl_jax.data.schema import Task
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstration, Demonstrator
from searchrl_jax.rollout.batch import RowShape, Rows, Sample, fill


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
        self, demonstrator: Demonstrator, tasks: Sequence[Task], seed: int, shape: RowShape, *, copy_steps: int
    ) -> None:
        """Args:
        tasks: training tasks; each demonstration is of one drawn at random.
        shape: of the one micro-batch that an update takes.
        copy_steps: first updates that take repeated random sequences instead.
        """
        self.demonstrator, self.tasks, self.seed, self.shape = demonstrator, tasks, seed, shape
        self.copy_steps = copy_steps
        self.next = 0

    def demonstration(self, n: int) -> Demonstration:
        """The n-th."""
        rng = np.random.default_rng([self.seed, n])
        return self.demonstrator.demonstrate(self.tasks[int(rng.integers(len(self.tasks)))], rng)

    def batch(self, update: int) -> Rows:
        """The micro-batch of `update`, counted from 1; to be called in order, since demonstrations are used up."""
        return self._copying(update) if update <= self.copy_steps else self._next_demonstrations()

    def _copying(self, update: int) -> Rows:
        """Random tokens, repeated; all of the repetition but its first token is an action, since all of it can be told.

        A decoder learns to look up what followed a token before, on which copying a name rests, in a hundred such
        updates; from demonstrations alone, where few tokens are copied, it takes several hundred.
        """
        rng = np.random.default_rng([self.seed, update, 1])
        vocab_size = self.demonstrator.dialect.tokenizer.vocab_size
        rows: list[list[Sample]] = []
        for _ in range(self.shape.rows):
            row: list[Sample] = []
            tokens = actions = 0
            while True:
                half = int(rng.integers(6, 60))
                if tokens + 2 * half > self.shape.length or actions + half > self.shape.actions:
                    break
                ids = np.tile(rng.integers(vocab_size, size=half, dtype=np.int32), 2)
                zeros = np.zeros(2 * half, np.float32)
                row.append(Sample(ids, np.arange(2 * half) > half, zeros, zeros))
                tokens, actions = tokens + 2 * half, actions + half
            rows.append(row)
        return fill(rows, self.shape)

    def _next_demonstrations(self) -> Rows:
        """As many further demonstrations as fit, in order, into one micro-batch; the first that does not, waits."""
        free = [[self.shape.length, self.shape.actions] for _ in range(self.shape.rows)]
        rows: list[list[Sample]] = [[] for _ in free]
        while True:
            demo = self.demonstration(self.next)
            length, actions = len(demo.token_ids), int(demo.is_action.sum())
            fitting = [b for b, (tokens, targets) in enumerate(free) if length <= tokens and actions <= targets]
            if not fitting:
                return fill(rows, self.shape)
            zeros = np.zeros(length, np.float32)
            rows[fitting[0]].append(Sample(demo.token_ids, demo.is_action, zeros, zeros))
            free[fitting[0]][0] -= length
            free[fitting[0]][1] -= actions
            self.next += 1
