"""The search environment: one task, a few tools, one submission.

`SearchEnv` holds what all episodes share and never changes: tools, documents, limits. `start` gives an `Episode`, which
holds the rest, so that many run at once on threads. An episode itself is stepped by one thread at a time.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.env.actions import Refused, Search, Submit, read_action, short_number
from searchrl_jax.env.limits import Limits
from searchrl_jax.env.observations import ObservationFormat, References, render_hits, see_also_of, title_of
from searchrl_jax.env.rewards import (
    CONTEXT_LIMIT,
    MALFORMED,
    STATUSES,
    SUBMITTED,
    TOKEN_LIMIT,
    TOOL_FAILURE,
    TURN_LIMIT,
    RewardSpec,
)
from searchrl_jax.env.tools import ToolError, ToolRunner
from searchrl_jax.retrieval import Retriever
from searchrl_jax.text.hermes import SUBMIT, Call, Malformed, parse_call


def count_words(text: str) -> int:
    """Words between white space: the default measure of length where no tokenizer is at hand."""
    return len(text.split())


@dataclass(frozen=True)
class StepResult:
    """What one turn led to.

    Attributes:
        observation: text for the policy; where the episode is over, only for the record.
        status: None while the episode goes on, else how it ended.
        reward: of all turns, set when the episode has ended; None before that, and where it is masked (tool_failure).
        components: parts of the reward, adding up to it.
        malformed: the turn was not exactly one call.
        error: code of what was wrong with the turn or the tool, None where nothing was: a `Malformed.reason`, a
            `Refused.error`, or "tool_failure".
        tool: the tool that ran, if one did.
        query: what it was asked.
        shown: documents in the observation, best first.
        ranking: documents submitted, best first.
        seconds: that the turn took, tools included.
        detail: of a tool failure, for logs.
    """

    observation: str
    status: str | None = None
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    malformed: bool = False
    error: str | None = None
    tool: str | None = None
    query: str | None = None
    shown: tuple[str, ...] = ()
    ranking: tuple[str, ...] = ()
    seconds: float = 0.0
    detail: str | None = None

    @property
    def done(self) -> bool:
        """The episode is over."""
        return self.status is not None


class SearchEnv:
    """Search tools over documents; the factory of episodes.

    `reset` and `step` are a face for one episode at a time; rollouts use `start`.
    """

    def __init__(
        self,
        retrievers: Mapping[str, Retriever],
        documents: Sequence[Document],
        limits: Limits,
        reward: RewardSpec = RewardSpec(),  # noqa: B008 (frozen)
        *,
        results: int = 5,
        observation_words: int = 24,
        observation_tokens: int = 256,
        see_also: int = 4,
        short_repeats: bool = True,
        keep_observations: int = 0,
        count_tokens: Callable[[str], int] = count_words,
        tool_timeout_seconds: float = 10.0,
        tool_retries: int = 2,
    ) -> None:
        """Checks all that can be checked before a policy runs.

        Args:
            retrievers: by tool name, in the order in which the policy is told of them.
            documents: all that the retrievers can return.
            limits: of an episode.
            reward: of an episode.
            results: hits of a search at most. The same query to the same tool again in an episode shows the next ones.
            observation_words: words of each hit's text at most.
            observation_tokens: budget of an observation, by `count_tokens`.
            see_also: linked names of each hit at most.
            short_repeats: show a document described before by reference and title alone.
            keep_observations: that the policy can read, the last ones; a placeholder stands for older ones
                (`env.history.compress`). 0 for all.
            count_tokens: tokens of a text; give the tokenizer's where the budget must be exact. It must be safe to call
                from several threads.
            tool_timeout_seconds: for one tool call with its retries.
            tool_retries: further attempts when a tool raises; a call out of time is not repeated.

        Raises:
            ValueError: no tools, a tool named submit, duplicate documents, text that UTF-8 cannot hold, a bad number.
        """
        if not retrievers:
            raise ValueError("expected at least one search tool, got none; give a mapping from tool name to Retriever")
        if SUBMIT in retrievers:
            raise ValueError(f"the name {SUBMIT!r} is the environment's own; rename that search tool")
        if results < 1:
            raise ValueError(f"expected results >= 1, got {results}; a search must be able to return something")
        if keep_observations < 0:
            raise ValueError(f"expected keep_observations >= 0, got {keep_observations}; 0 keeps all")
        self.retrievers = dict(retrievers)
        self.documents = _by_id(documents)
        self.limits = limits
        self.reward = reward
        self.results, self.keep_observations = results, keep_observations
        self.count_tokens = count_tokens
        self.layout = ObservationFormat(observation_words, see_also, observation_tokens, short_repeats, count_tokens)
        self.runner = ToolRunner(tool_timeout_seconds, tool_retries)
        self._episode: Episode | None = None

    def with_limits(self, limits: Limits) -> SearchEnv:
        """The same tools and documents under other limits."""
        other = copy.copy(self)
        other.limits, other._episode = limits, None
        return other

    def start(self, task: Task) -> Episode:
        """A new episode of `task`, independent of all others."""
        return Episode(self, task)

    def reset(self, task: Task) -> Episode:
        """Begins the one episode that `step` acts on, and returns it; `.question` is what the policy is asked."""
        self._episode = self.start(task)
        return self._episode

    def step(self, action: str | Call | Malformed) -> StepResult:
        """`Episode.step` of the episode that `reset` began.

        Raises:
            ValueError: `reset` was not called, or the episode is over.
        """
        if self._episode is None:
            raise ValueError("expected reset(task) before step; begin an episode first")
        return self._episode.step(action)


class Episode:
    """One task being worked on. Ends in exactly one of `STATUSES`.

    Attributes:
        task: what is asked and how it is judged.
        question: the text for the policy.
        references: documents shown so far, and their local numbers.
        turn: turns used up.
        turn_rewards: what each turn was paid, and behind them what `fail` paid; they add up to the reward.
        result: of the last turn, once the episode is over.
    """

    def __init__(self, env: SearchEnv, task: Task) -> None:
        excluded = set(task.excluded_ids)
        self.task = task
        self.question = task.query
        self.references = References()
        self._shown: Counter[tuple[str, str]] = Counter()  # results of each tool and query so far
        self.turn = 0
        self.turn_rewards: list[float] = []
        self.result: StepResult | None = None
        self._env = env
        self._excluded = excluded
        self._excluded_titles = {title_of(env.documents[doc_id]) for doc_id in excluded if doc_id in env.documents}
        self._tokens = env.count_tokens(task.query)

    @property
    def done(self) -> bool:
        """The episode is over."""
        return self.result is not None

    def step(self, action: str | Call | Malformed) -> StepResult:
        """Acts on one turn of the policy; every turn, also a faulty one, uses up one of `limits.max_turns`.

        The last turn can only submit: a search in it is not run, since nobody would read what it found.

        Args:
            action: the turn's text, or what a dialect parsed from its ids. Text is measured here, by `count_tokens`,
                against the token limits; with a parsed turn the caller has counted the ids and calls `fail` where a
                limit is broken.

        Raises:
            ValueError: the episode is over.
        """
        self._require_running()
        began = time.perf_counter()
        result = self._act(action)
        result = replace(result, seconds=time.perf_counter() - began)
        if result.done:
            self.result = result
        else:
            self.turn_rewards.append(self._paid(result))
        return result

    def fail(self, status: str, detail: str | None = None) -> StepResult:
        """Ends the episode from outside: the engine saw a token limit, or the host could not go on.

        Args:
            status: "token_limit" (a turn reached its cap without an end), "context_limit" (no room left), "turn_limit"
                or "tool_failure".
            detail: for logs.

        Raises:
            ValueError: the episode is over, or `status` is not a failure.
        """
        self._require_running()
        if status == SUBMITTED or status not in STATUSES:
            raise ValueError(
                f"expected a failure out of {STATUSES[1:]}, got {status!r}; only a valid submit call submits"
            )
        self.result = self._end(status, StepResult(_END_TEXT[status], detail=detail))
        return self.result

    def _require_running(self) -> None:
        if self.result is not None:
            raise ValueError(f"the episode of {self.task.task_id!r} is over ({self.result.status}); start another")

    def _act(self, action: str | Call | Malformed) -> StepResult:
        self.turn += 1
        limits = self._env.limits
        is_text = isinstance(action, str)
        if isinstance(action, str):
            length = self._env.count_tokens(action)
            self._tokens += length
            if length > limits.max_tokens_per_turn:
                return self._end(TOKEN_LIMIT, StepResult(_END_TEXT[TOKEN_LIMIT]))
            action = parse_call(action)
        result = self._answer(action)
        if result.done:
            return result
        if self.turn >= limits.max_turns:
            return self._end(TURN_LIMIT, replace(result, observation=_END_TEXT[TURN_LIMIT]))
        if is_text:
            self._tokens += self._env.count_tokens(result.observation)
            if self._tokens >= limits.max_tokens_per_episode:
                return self._end(CONTEXT_LIMIT, result)
        return result

    def _answer(self, action: Call | Malformed) -> StepResult:
        """The turn's outcome, limits aside."""
        if isinstance(action, Malformed):
            return StepResult(f"error: {action.message}", malformed=True, error=action.reason)
        intent = read_action(action, self._env.retrievers)
        if isinstance(intent, Submit):
            unknown = [number for number in intent.ranking if self.references.doc_id(number) is None]
            if not unknown:
                ranking = tuple(self.references.doc_ids[number - 1] for number in intent.ranking)
                return self._end(SUBMITTED, StepResult("submitted", ranking=ranking))
            intent = Refused("unknown_reference", f"error: unknown reference {short_number(unknown[0])}")
        if isinstance(intent, Refused):
            return StepResult(intent.message, error=intent.error)
        if self.turn >= self._env.limits.max_turns:
            return StepResult("")
        return self._search(intent)

    def _search(self, search: Search) -> StepResult:
        asked = search.tool, search.query
        skipped = self._shown[asked]
        try:
            hits = self._env.runner.run(search.tool, lambda: self._hits(search, skipped))
        except ToolError as error:
            result = StepResult(
                f"error: {search.tool} is not available", error=TOOL_FAILURE, tool=search.tool, query=search.query
            )
            return self._end(TOOL_FAILURE, replace(result, detail=str(error)))
        keep, found = self._env.keep_observations, [document.doc_id for document in hits]
        best = self.references.best(search.query, found, skipped) if hits else None
        text, shown = render_hits(
            search.query,
            hits,
            self.references,
            self._excluded_titles,
            self._env.layout,
            leader=None if best is None or best in found else self._env.documents[best],
            skipped=skipped,
            turn=self.turn,
            readable_from=self.turn - keep + 1 if keep else 0,
        )
        self._shown[asked] += len(shown)
        return StepResult(text, tool=search.tool, query=search.query, shown=shown)

    def _hits(self, search: Search, skipped: int) -> list[Document]:
        """Documents found, best first, after the first `skipped`.

        Runs on the tool's thread and changes nothing: the episode may have moved on.
        """
        env = self._env
        # The excluded may fill the first places, so as many more are asked for.
        hits = env.retrievers[search.tool].search(search.query, k=skipped + env.results + len(self._excluded))
        doc_ids = list(dict.fromkeys(hit.doc_id for hit in hits))
        unknown = [doc_id for doc_id in doc_ids if doc_id not in env.documents]
        if unknown:
            raise ValueError(
                f"the index returned {unknown[0]!r}, which is no document of ours; build it from these documents"
            )
        found = [env.documents[doc_id] for doc_id in doc_ids if doc_id not in self._excluded]
        return found[skipped : skipped + env.results]

    def _end(self, status: str, result: StepResult) -> StepResult:
        reward, components = self._env.reward.score(status, result.ranking, self.task.relevance)
        if reward is not None:
            self.turn_rewards.append(reward + self._paid(result))
            if self._env.reward.malformed_reward:
                components[MALFORMED] = sum(self.turn_rewards) - reward
            reward = sum(self.turn_rewards)
        return replace(result, status=status, reward=reward, components=components)

    def _paid(self, result: StepResult) -> float:
        """What the turn itself is paid, apart from what the end is."""
        return self._env.reward.malformed_reward if result.malformed else 0.0


_END_TEXT = {
    TURN_LIMIT: "the turn limit is reached",
    TOKEN_LIMIT: "the token limit of a turn is reached",
    CONTEXT_LIMIT: "the token limit of the episode is reached",
    TOOL_FAILURE: "error: a tool is not available",
}


def _by_id(documents: Sequence[Document]) -> dict[str, Document]:
    by_id: dict[str, Document] = {}
    for document in documents:
        if document.doc_id in by_id:
            raise ValueError(f"expected distinct documents, got {document.doc_id!r} twice; drop the duplicate")
        # Found here, not in the middle of a run by the tokenizer.
        for text in (document.doc_id, document.title, document.text, *see_also_of(document.metadata)):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"document {document.doc_id!r} holds text that UTF-8 cannot: {error}; clean it"
                ) from error
        by_id[document.doc_id] = document
    return by_id
