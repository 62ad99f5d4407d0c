"""Behaviour cloning: the base agent, from a demonstrator of mixed quality."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import optax
from jaxtyping import Int32

from searchrl_jax.config.schema import WarmupConfig
from searchrl_jax.data.schema import Task
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstrator
from searchrl_jax.env.history import rows_between
from searchrl_jax.env.observations import LINK_SIGNS, LINKS_WORD
from searchrl_jax.env.rewards import CONTEXT_LIMIT, TOKEN_LIMIT, TURN_LIMIT
from searchrl_jax.rollout.batch import Rows, RowShape, Sample, fill, pack
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.tokenizer import Tokenizer


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


# What to raise where demonstrations meet a limit.
SETTING_OF = {
    TURN_LIMIT: "env.max_turns",
    TOKEN_LIMIT: "sampling.sampling_max_tokens",
    CONTEXT_LIMIT: "env.max_tokens_per_episode",
}
FAILED_SHARE = 0.1


def warn_of_limits(demonstrator: Demonstrator, tasks: Sequence[Task], seed: int, *, count: int = 64) -> str:
    """What to raise, where more than a tenth of the good demonstrations fail at a limit; empty where they don't.

    The base agent learns to fail from them, and the tuned one seldom makes up for it.

    Args:
        tasks: training tasks, of which `count` drawn ones are played.
    """
    ends = []
    for n in range(count):
        rng = np.random.default_rng([seed, n])
        demonstration = demonstrator.demonstrate(tasks[int(rng.integers(len(tasks)))], rng)
        if demonstration.style == GOOD:
            ends.append(demonstration.status)
    met = Counter(status for status in ends if status in SETTING_OF)
    if met.total() <= FAILED_SHARE * len(ends):
        return ""
    found = ", ".join(f"{status} {number}" for status, number in met.most_common())
    raised = " and ".join(SETTING_OF[status] for status, _ in met.most_common())
    return f"{met.total()} of {len(ends)} good demonstrations fail at a limit ({found}); raise {raised}"


# What an observation puts around the words of documents.
LAYOUT = f"[1]: {LINKS_WORD} 1: {' '.join(LINK_SIGNS)}\norder:1,\nerror:"


class Scrambler:
    """Gives an episode's words other pieces, the same everywhere in it: invented names, true structure.

    Demonstrations repeat the same few thousand names and sentences, which a decoder learns by heart sooner than it
    learns to copy; a scrambled one can only be foretold by copying. Control tokens, scaffolds, digits and the layout
    keep their places. A word stays a word, and a piece with a leading space stays one. So do parts of characters: a
    policy that has learned to write them writes them anywhere at times.
    """

    def __init__(self, tokenizer: Tokenizer | PretrainedTokenizer) -> None:
        fixed = {*tokenizer.control_ids.values(), *tokenizer.header_ids.values(), *tokenizer.scaffold_ids.values()}
        fixed.update(tokenizer.encode(LAYOUT))
        classes: dict[tuple[bool, bool], list[int]] = {}
        for id_ in range(tokenizer.vocab_size):
            piece = tokenizer.decode([id_])
            is_text = piece.isprintable() and not any(map(str.isdigit, piece)) and "\ufffd" not in piece
            if id_ not in fixed and is_text and piece.strip():
                classes.setdefault((piece.startswith(" "), any(map(str.isalpha, piece))), []).append(id_)
        self._classes = [np.array(members, np.int32) for members in classes.values()]
        self._identity = np.arange(tokenizer.vocab_size, dtype=np.int32)

    def __call__(
        self, ids: Int32[np.ndarray, " L"], rng: np.random.Generator, kept: Sequence[int] = ()
    ) -> Int32[np.ndarray, " L"]:
        """`ids` under a random permutation of the pieces of each class, but for those in `kept`."""
        table = self._identity.copy()
        for members in self._classes:
            renamed = np.setdiff1d(members, kept)
            table[renamed] = rng.permutation(renamed)
        return table[ids]


class DemonstrationStream:
    """Micro-batches for behaviour cloning: first repeated random sequences, then demonstrations.

    Update u and the n-th demonstration are functions of (seed, u) and (seed, n) alone, so the whole state of the stream
    is two numbers: updates made, and demonstrations used up.
    """

    def __init__(
        self,
        demonstrator: Demonstrator,
        tasks: Sequence[Task],
        seed: int,
        shapes: Sequence[RowShape],
        *,
        copy_steps: int,
        scrambled: float,
    ) -> None:
        """Args:
        tasks: training tasks; each demonstration is of one drawn at random.
        shapes: of micro-batches; an update takes one of the first shape, and more where a demonstration needs another.
        copy_steps: first updates, which take random sequences.
        scrambled: share of the demonstrations whose words are scrambled.
        """
        self.demonstrator, self.tasks, self.seed, self.shapes = demonstrator, tasks, seed, shapes
        self.copy_steps, self.scrambled = copy_steps, scrambled
        self.scramble = Scrambler(demonstrator.dialect.tokenizer)
        self.next = 0

    def demonstration(self, n: int) -> list[Sample]:
        """The rows of the n-th: one, unless its history is compressed. A row with slips alone teaches nothing."""
        rng = np.random.default_rng([self.seed, n])
        task = self.tasks[int(rng.integers(len(self.tasks)))]
        demo = self.demonstrator.demonstrate(task, rng)
        ids = demo.token_ids
        if rng.random() < self.scrambled:
            ids = self.scramble(ids, rng, self._frame(task))
        zeros = np.zeros(len(ids), np.float32)
        rows = rows_between(demo.row_starts, demo.is_action)
        rows = [row for row in rows if demo.is_imitated[row].any()]
        return [Sample(ids[row], demo.is_imitated[row], zeros[row], zeros[row]) for row in rows]

    def _frame(self, task: Task) -> list[int]:
        """The pieces of the question around what it quotes: they say what is asked, so they keep their meaning."""
        quoted = [str(task.metadata[name]) for name in ("description", "target_description") if name in task.metadata]
        frame = task.query if quoted else ""
        for text in quoted:
            frame = frame.replace(text, "")
        return self.demonstrator.dialect.tokenizer.encode(frame)

    def batch(self, update: int) -> list[Rows]:
        """The micro-batches of `update`, counted from 1. In order: it uses demonstrations up."""
        return [self._copying(update)] if update <= self.copy_steps else self._demonstrations()

    def _copying(self, update: int) -> Rows:
        """Random tokens, repeated; all of the repetition but its first token is an action, since all of it can be told.

        Looking up what followed a token before is what copying a name rests on. Here every token of a repetition
        teaches it; in a demonstration one in ten does.
        """
        rng = np.random.default_rng([self.seed, update, 1])
        vocab_size, shape = self.demonstrator.dialect.tokenizer.vocab_size, self.shapes[0]
        longest = min(48, shape.length // 2 + 1, shape.actions + 1)
        rows: list[list[Sample]] = []
        for _ in range(shape.rows):
            row: list[Sample] = []
            tokens = actions = 0
            while True:
                half = int(rng.integers(longest // 8, longest))
                if tokens + 2 * half > shape.length or actions + half > shape.actions:
                    break
                ids = np.tile(rng.integers(vocab_size, size=half, dtype=np.int32), 2)
                zeros = np.zeros(2 * half, np.float32)
                row.append(Sample(ids, np.arange(2 * half) > half, zeros, zeros))
                tokens, actions = tokens + 2 * half, actions + half
            rows.append(row)
        return fill(rows, shape)

    def _demonstrations(self) -> list[Rows]:
        """As many further demonstrations as fit, in order, into the rows of the first shape; the next one waits."""
        shape = self.shapes[0]
        free = [[shape.length, shape.actions] for _ in range(shape.rows)]
        samples: list[Sample] = []
        large = 0
        while large < shape.rows:  # a batch of large ones alone would never be full
            left = [list(row) for row in free]  # a demonstration goes in as a whole
            demonstration = self.demonstration(self.next)
            for sample in demonstration:
                length, actions = len(sample.token_ids), int(sample.is_action.sum())
                fitting = [row for row in left if length <= row[0] and actions <= row[1]]
                is_large = length > shape.length or actions > shape.actions
                large += is_large
                if not fitting and not is_large and samples:
                    return pack(samples, self.shapes)
                if fitting:
                    fitting[0][0] -= length
                    fitting[0][1] -= actions
            free = left
            samples += demonstration
            self.next += 1
        return pack(samples, self.shapes)
