"""A scripted demonstrator of mixed quality, which behaviour cloning imitates.

It plays real episodes of the environment on training tasks, knows their judgements, and plays in one of four styles,
drawn at random *given* the question: failures that depended on the question would be the same in all rollouts of a
group, and a group without variance teaches nothing.

    good      searches with what the question quotes and the package that it names, then so for the second quotation, or
              once more for the first; where a page is to be read on from, searches for the names that the best one so
              far points to; submits the order that the last observation ends with
    lazy      searches once and submits what came back, in its order
    rambling  asks the second tool the same again and again, until the turn limit
    overlong  pastes what it found into a query to the second tool until the token limit of the turn; it does not go in
              circles, since demonstrations that do teach loops that reinforcement learning hardly unlearns

A call may *slip*: it breaks off with a few wrong tokens, is closed (or left malformed), and then written again. The
wrong tokens are in the episode but not to be imitated; what follows them is. A malformed call may come again as it was.
A policy that has only ever read what is right repeats a wrong token until the turn's limit, and a wrong call until no
turn is left.

The first search uses either tool, since which of them serves is for reinforcement learning to find out. Later ones that
are flawed use the second tool, and good ones the first: where both begin alike, the penalty of the one teaches not to
search again at all.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.env.history import compress
from searchrl_jax.env.observations import LEFT_OUT, LINKS_WORD
from searchrl_jax.env.rewards import CONTEXT_LIMIT, TOKEN_LIMIT
from searchrl_jax.env.search_env import Episode, SearchEnv
from searchrl_jax.text.calls import Call, Malformed
from searchrl_jax.text.dialect import Dialect
from searchrl_jax.text.hermes import search_call, submit_call

ODD_CHARACTERS = frozenset('"\\{}[]<>|')  # in a query they would need escapes, or look like call syntax

GOOD, LAZY, RAMBLING, OVERLONG = "good", "lazy", "rambling", "overlong"


class DemonstrationError(ValueError):
    """Settings under which a style cannot be played; the message names them."""


@dataclass(frozen=True)
class Demonstration:
    """One episode, token by token; `is_action` is true on what a policy would have sampled.

    `is_imitated` is true on the part of it that a policy is to learn: all but the wrong tokens of a slip. Where its
    history was compressed a row begins: `row_starts`.
    """

    task_id: str
    style: str
    status: str
    reward: float | None
    token_ids: Int32[np.ndarray, " L"]
    is_action: Bool[np.ndarray, " L"]
    is_imitated: Bool[np.ndarray, " L"]
    row_starts: tuple[int, ...] = (0,)


class Demonstrator:
    """Plays training tasks of `env`.

    Tasks with the metadata of the embedded corpus (`description`, `package`, `via`, `target_description`) are played
    hop by hop; any other task as a known item, searched with the words of its question.
    """

    def __init__(
        self,
        env: SearchEnv,
        dialect: Dialect,
        documents: Sequence[Document],
        shares: Mapping[str, float],
        *,
        slips: float = 0.0,
        query_words: int = 12,
    ) -> None:
        """Args:
        shares: probability of each style; they sum to 1.
        slips: probability that a query slips; a submission does half as often.
        query_words: words of a quotation that a query takes at most.
        """
        if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
            raise ValueError(f"expected shares of styles that sum to 1, got {dict(shares)}; correct warmup.*")
        self.env, self.dialect, self.slips, self.query_words = env, dialect, slips, query_words
        self.left_out = functools.partial(dialect.render_observation, LEFT_OUT)
        tokenizer = dialect.tokenizer
        syntax = {*tokenizer.control_ids.values(), *tokenizer.header_ids.values(), *tokenizer.scaffold_ids.values()}
        pieces = {id_: tokenizer.decode([id_]) for id_ in range(tokenizer.vocab_size) if id_ not in syntax}
        self.syntax = np.array(sorted(syntax))
        self.words = np.array([id_ for id_, piece in pieces.items() if piece.strip().isalpha()])
        self.documents = {document.doc_id: document for document in documents}
        self.styles, self.shares = list(shares), np.array(list(shares.values()))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> Demonstration:
        """One episode of `task`, in a style that `rng` draws.

        Raises:
            DemonstrationError: the limits or the documents leave that style no episode.
        """
        style = self.styles[int(rng.choice(len(self.styles), p=self.shares))]
        play = _Play(self, task, rng)
        {GOOD: play.good, LAZY: play.lazy, RAMBLING: play.ramble, OVERLONG: play.overlong}[style]()
        result = play.episode.result
        if result is None or result.status is None:
            raise DemonstrationError(
                f"the {style} demonstration of task {task.task_id!r} did not end within {self.env.limits.max_turns} "
                "turns; raise env.max_turns"
            )
        return Demonstration(
            task_id=task.task_id,
            style=style,
            status=result.status,
            reward=result.reward,
            token_ids=np.array(play.token_ids, np.int32),
            is_action=np.array(play.is_action, bool),
            is_imitated=np.array(play.is_imitated, bool),
            row_starts=tuple(play.row_starts),
        )


class _Play:
    """One demonstration in the making."""

    def __init__(self, demonstrator: Demonstrator, task: Task, rng: np.random.Generator) -> None:
        self.d, self.task, self.rng = demonstrator, task, rng
        self.episode: Episode = demonstrator.env.start(task)
        self.prompt = demonstrator.dialect.render_prompt(self.episode.question)
        self.token_ids = list(self.prompt)
        self.is_action = [False] * len(self.token_ids)
        self.is_imitated = list(self.is_action)
        self.exchanges: list[tuple[list[int], list[int]]] = []
        self.row_starts = [0]
        self.bm25, *self.others = list(demonstrator.env.retrievers)
        self.second = self.others[0] if self.others else self.bm25
        self.observations: list[str] = []

    # ---------------------------------------------------------------- styles

    def good(self) -> None:
        """Trusts the order of the last observation: reads on from its first page with links, and submits it.

        That order can be read off. The right page and the order of the judgements cannot, and a policy that imitates
        what it cannot know guesses: it then reads on from reference 1 whatever the order says.
        """
        shown = self._first_search()
        if self._told("target_description"):
            self._search(self.bm25, self._query("target_description"))
        elif shown:
            self._search(self.bm25, self._query("description"))  # more, or the next ones
            page = self.task.metadata.get("via")
            if isinstance(page, str) and page in self.d.documents:
                links = next(filter(None, map(self._links, self.episode.references.ranking)), "")
                if links:
                    self._search(self.bm25, links)
        self._submit(self.episode.references.ranking[:10])

    def lazy(self) -> None:
        """Searches once and trusts the order that comes back."""
        self._submit(self._first_search()[:10])

    def ramble(self) -> None:
        """Asks the same, and the second tool for ever more of it, until no turn is left."""
        tool = self._either()[0]
        while not self.episode.done:
            self._call(self._search_call(tool, self._cut(self._query("description"))))
            tool = self.second

    def overlong(self) -> None:
        """Searches, then pastes what came back into the next query, which does not end within the turn's tokens.

        What it pastes can be copied. Words out of nowhere would be the larger part of the loss, and teach the policy to
        put probability on all of the vocabulary.
        """
        self._search(self._either()[0], self._query("description"))
        if self.episode.done:
            return
        limit = self.d.env.limits.max_tokens_per_turn
        words = [word for word in " ".join(self.observations[-1:]).split() if not set(word) & ODD_CHARACTERS]
        ids = self.d.dialect.render_call(search_call(self.second, " ".join(words)))
        if len(ids) <= limit:  # it found too little to fill the turn: other documents go on where it ends
            texts = (self.d.documents[doc_id].text for doc_id in self.rng.permutation(sorted(self.d.documents))[:limit])
            others = [word for text in texts for word in text.split() if not set(word) & ODD_CHARACTERS]
            words = list(dict.fromkeys([*words, *others]))[: 2 * limit]
            ids = self.d.dialect.render_call(search_call(self.second, " ".join(words)))
        if len(ids) <= limit:
            raise DemonstrationError(
                f"warmup.overlong: expected sampling.sampling_max_tokens below {len(ids)}, the length of a query that "
                f"holds the words of all documents, got {limit}; lower it, or set warmup.overlong to 0"
            )
        self._write(ids)

    # ---------------------------------------------------------------- moves

    def _search(self, tool: str, query: str) -> list[str]:
        """Documents in the observation, best first; none where the only turn left is needed to submit."""
        call = self._search_call(tool, self._cut(query))
        shown: list[str] = []
        if self._may_search() and self.rng.random() < self.d.slips:
            shown = self._slip(call, is_malformed=self.rng.random() < 0.5)
        return self._call(call) if self._may_search() else shown

    def _first_search(self) -> list[str]:
        """Documents that either tool finds; the other is asked where the first finds nothing, as a lexical one may."""
        shown: list[str] = []
        for tool in self._either():
            shown = shown or self._search(tool, self._query("description"))
        return shown

    def _may_search(self) -> bool:
        return not self.episode.done and self.episode.turn < self.d.env.limits.max_turns - 1

    def _slip(self, call: Call, *, is_malformed: bool) -> list[str]:
        """Writes `call` with up to six wrong tokens: its query or ranking breaks off with them.

        Args:
            is_malformed: they stand in the place of the end or the head of the arguments, too, or behind the end; what
                comes back says that this is no call.

        Source:
            Laskey et al. 2017, arXiv:1703.09327 (DART): noise in a demonstrator's actions shows how to recover.
        """
        ids, rng, count = self.d.dialect.render_call(call), self.rng, int(self.rng.integers(1, 4))
        arguments = np.flatnonzero(~np.isin(ids, self.d.syntax))
        if not len(arguments):
            return []  # a question of odd characters alone leaves nothing to ask with, and nothing to break off
        begin, end = int(rng.choice(arguments[1:])) if len(arguments) > 1 else int(arguments[0]), int(arguments[-1]) + 1
        anything = rng.choice(self.d.words, count)
        again = np.repeat(ids[begin - 1], count)
        start = int(rng.integers(len(self.token_ids)))
        elsewhere = np.array(self.token_ids[start : start + 2 * count])
        wrong = (anything, again, elsewhere)[int(rng.integers(3))].tolist()
        places = ((begin, end + 1), (1, 2), (end + 1, end + 1))
        begin, end = places[int(rng.integers(3))] if is_malformed else (begin, end)
        written = [*ids[:begin], *wrong, *ids[end:]]
        slipped = self.d.dialect.parse(written)
        if isinstance(slipped, Malformed) != is_malformed or len(written) > self.d.env.limits.max_tokens_per_turn:
            return []  # what slipped in makes another kind of call, or does not fit: no slip
        first = len(self.token_ids) + begin
        shown = self._call(slipped, written)
        imitated_from = first + (len(written) - begin if is_malformed else len(wrong))
        self.is_imitated[first:imitated_from] = [False] * (imitated_from - first)
        while is_malformed and self._may_search() and rng.random() < 0.5:
            first = len(self.token_ids)
            self._call(slipped, written)
            self.is_imitated[first : first + len(written)] = [False] * len(written)
        return shown

    def _submit(self, doc_ids: Sequence[str]) -> None:
        """Submits; with nothing to submit, all that is left is to search on."""
        if self.episode.done:
            return
        if not doc_ids:
            self.ramble()
            return
        references = self.episode.references
        call = submit_call([references.number(doc_id) for doc_id in doc_ids])
        if self._may_search() and self.rng.random() < self.d.slips / 2:
            self._slip(call, is_malformed=True)
        if not self.episode.done:
            self._call(call)

    def _either(self) -> tuple[str, str]:
        """Both tools, in a random order."""
        return (self.bm25, self.second) if self.rng.random() < 0.5 else (self.second, self.bm25)

    def _call(self, call: Call | Malformed, ids: Sequence[int] | None = None) -> list[str]:
        """Documents that the observation of `call` shows; it is written as `ids`, if given."""
        action = list(self.d.dialect.render_call(call) if ids is None and isinstance(call, Call) else ids or ())
        if not self._write(action):
            return []
        result = self.episode.step(call)
        if result.status is None:
            self.exchanges.append((action, self.d.dialect.render_observation(result.observation, action)))
            history = compress(self.prompt, self.exchanges, self.d.left_out, keep=self.d.env.keep_observations)
            if len(history) >= self.d.env.limits.max_tokens_per_episode:
                self.episode.fail(CONTEXT_LIMIT)
                return []
            row = self.token_ids[self.row_starts[-1] :]
            if history[: len(row)] == row:
                history = history[len(row) :]
            else:
                self.row_starts.append(len(self.token_ids))
            self.token_ids += history
            self.is_action += [False] * len(history)
            self.is_imitated += [False] * len(history)
            self.observations.append(result.observation)
        return list(result.shown)

    def _write(self, ids: Sequence[int]) -> bool:
        """Adds a turn's tokens; false where they break a limit, which ends the episode as it would end a rollout."""
        limits = self.d.env.limits
        room = min(
            limits.max_tokens_per_turn, limits.max_tokens_per_episode - len(self.token_ids) + self.row_starts[-1]
        )
        written = list(ids[:room])
        self.token_ids += written
        self.is_action += [True] * len(written)
        self.is_imitated += [True] * len(written)
        if len(ids) > room:
            self.episode.fail(TOKEN_LIMIT if room == limits.max_tokens_per_turn else CONTEXT_LIMIT)
        return len(ids) <= room

    # ---------------------------------------------------------------- choices

    def _query(self, told: str) -> str:
        """What the question quotes, and the package that it names, if it is one on the embedded corpus.

        Args:
            told: the metadata that holds the quotation; the whole question is taken where it has none.
        """
        quoted = self._quoted(self._told(told) or self.task.query)
        return f"{quoted} {self._told('package')}".strip()

    def _told(self, name: str) -> str:
        """The task's metadata under `name`, where the question says as much: what it doesn't say can't be copied."""
        value = self.task.metadata.get(name)
        return value if isinstance(value, str) and value in self.task.query else ""

    def _quoted(self, text: str) -> str:
        """The words of `text` up to the first that a query may not hold; so what is copied stands in one piece."""
        words = text.split()[: self.d.query_words]
        odd = [index for index, word in enumerate(words) if set(word) & ODD_CHARACTERS]
        start = odd[0] + 1 if odd[:1] == [0] else 0
        end = next((index for index in odd if index >= max(start, 2)), len(words))
        quoted = " ".join(words[start:end])
        try:
            self.d.dialect.render_call(search_call(self.bm25, quoted))
        except ValueError:  # an odd word among the first two that looks like the end of a call
            return " ".join(words[start : odd[0]]) if odd and odd[0] > start else ""
        return quoted

    def _search_call(self, tool: str, query: str) -> Call:
        """Names begin with a space, as in an observation; a quotation with none, as behind its quotation mark."""
        return search_call(tool, query, begins_with_space=query.startswith(f"{LINKS_WORD.strip()} "))

    def _cut(self, query: str) -> str:
        """`query` without the last words that do not fit into a turn."""
        words = query.split()
        longest = max(self.d.env.retrievers, key=len)
        limit = self.d.env.limits.max_tokens_per_turn
        while words and len(self.d.dialect.render_call(search_call(longest, " ".join(words)))) > limit:
            # One word alone may be a sentence, where a script has no spaces.
            words[-1:] = [words[-1][: len(words[-1]) // 2]] if len(words) == 1 and len(words[0]) > 1 else []
        return " ".join(words)

    def _links(self, doc_id: str) -> str:
        """The names of the pages that `doc_id` points to, as they were read, with the word and number before them.

        Names alone begin alike all over an observation, so that a policy would have to know where to copy from before
        it has written anything; behind the number it goes on from one place.
        """
        if doc_id not in self.episode.references.doc_ids:
            return ""
        number = self.episode.references.number(doc_id)
        readable = self.observations[-self.d.env.keep_observations :]
        lines = (line for observation in readable for line in observation.split("\n"))
        line = next((line for line in lines if line.startswith(f"[{number}] ")), "")
        start = line.find(f"{LINKS_WORD} {number}: ")
        names = line[start:].strip() if start >= 0 else ""
        return "" if set(names) & ODD_CHARACTERS else names
