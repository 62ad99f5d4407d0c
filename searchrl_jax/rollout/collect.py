"""Plays episodes: the engine decodes, finished turns go to the environment, observations are appended."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from searchrl_jax.data.schema import Task
from searchrl_jax.env import Episode, SearchEnv, StepResult
from searchrl_jax.env.history import compress
from searchrl_jax.env.observations import LEFT_OUT
from searchrl_jax.env.rewards import CONTEXT_LIMIT, TOKEN_LIMIT, TOOL_FAILURE
from searchrl_jax.models.decoder import Params
from searchrl_jax.rollout.engine import Engine, Sampling
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.text.hermes import Call, HermesDialect, Malformed


@dataclass(frozen=True)
class Request:
    """One rollout to play. Its tokens follow from the engine's run key and `uid` alone."""

    uid: int
    task: Task


@dataclass
class _Rollout:
    """A rollout in flight, in one slot of the engine."""

    request: Request
    episode: Episode
    prompt: list[int]
    began: float
    attempt: int
    is_action: list[bool] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turn_begins: int = 0
    turns: list[Turn] = field(default_factory=list)
    exchanges: list[tuple[list[int], list[int]]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # ids of the rows before the one that the slot holds
    row_starts: list[int] = field(default_factory=lambda: [0])

    def close_row(self, ids: Sequence[int]) -> None:
        """Ends the row of `ids`, which ends with an action; what is sampled next belongs to another."""
        self.closed += ids
        self.row_starts.append(len(self.closed))

    def pad_to(self, length: int) -> None:
        """Marks the tokens of the slot's row up to `length` as not the policy's."""
        missing = len(self.closed) + length - len(self.is_action)
        self.is_action += [False] * missing
        self.logprob += [0.0] * missing
        self.turn += [-1] * missing


class Player:
    """Plays requests with one engine and one environment.

    Rollouts are scheduled by what they sampled, never by how long a tool took: the turns that ended in a chunk are
    answered side by side on host threads and awaited before the next chunk. So the same weights, requests and shapes
    give the same arrays, bit for bit.
    """

    def __init__(
        self,
        engine: Engine,
        env: SearchEnv,
        dialect: HermesDialect,
        *,
        timeout_seconds: float,
        max_retries: int,
        keep_observations: int = 0,
        threads: int = 8,
    ) -> None:
        """Args:
        timeout_seconds: a rollout older than this has failed.
        max_retries: tries more for a rollout whose tool failed, before it is given back as failed.
        keep_observations: observations that stay in the history, the last ones; older ones give way to a placeholder,
            and the slot begins anew with the history that is left. 0 keeps all. The limit on the tokens of an episode
            is then on what the policy reads at a time.
        threads: tools that run at once.

        Raises:
            ValueError: an episode may grow longer than a slot of the engine.
        """
        if env.limits.max_tokens_per_episode > engine.shapes.capacity:
            raise ValueError(
                f"max_tokens_per_episode: expected at most the {engine.shapes.capacity} tokens of an engine's slot, "
                f"got {env.limits.max_tokens_per_episode}; raise the engine's capacity or lower the limit"
            )
        self.engine, self.env, self.dialect = engine, env, dialect
        self.timeout_seconds, self.max_retries = timeout_seconds, max_retries
        self.keep_observations, self._placeholder = keep_observations, dialect.render_observation(LEFT_OUT)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tool")
        self.seconds_in_tools = 0.0

    def play(
        self,
        params: Params,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        policy_version: int,
        on_finished: Callable[[int], None] = lambda _: None,
    ) -> list[Trajectory]:
        """The trajectories of `requests`, in their order.

        Args:
            policy_version: learner step of `params`, recorded with each sampled token.
            on_finished: called with the number of finished rollouts whenever it grows.

        Raises:
            ValueError: two requests have one uid, or a prompt leaves no room in its episode.
        """
        if len({request.uid for request in requests}) < len(requests):
            raise ValueError(
                "expected a uid for each request, got one twice: both would draw the same tokens; number them"
            )
        engine, limits = self.engine, self.env.limits
        waiting = deque((request, 0) for request in requests)
        live: dict[int, _Rollout] = {}
        finished: dict[int, Trajectory] = {}
        while waiting or live:
            for slot in range(engine.shapes.slots):
                if waiting and slot not in live:
                    request, attempt = waiting.popleft()
                    live[slot] = self._start(slot, request, attempt)
            engine.flush(params)
            budget = np.zeros(engine.shapes.slots, np.int32)
            for slot, rollout in live.items():
                length = len(engine.ids[slot])
                in_turn = length - rollout.turn_begins
                budget[slot] = min(limits.max_tokens_per_turn - in_turn, limits.max_tokens_per_episode - length)
            chunk = engine.decode(params, budget, sampling)
            ended = []
            for slot in sorted(live):
                rollout, count = live[slot], int(chunk.count[slot])
                rollout.is_action += [True] * count
                rollout.logprob += chunk.logprobs[slot, :count].tolist()
                rollout.turn += [len(rollout.turns)] * count
                if count == budget[slot] or engine.ids[slot][-1] == engine.stop_id:
                    ended.append(slot)
            for slot, result in zip(ended, self._answer([(slot, live[slot]) for slot in ended]), strict=True):
                rollout = live[slot]
                if result.status == TOOL_FAILURE and rollout.attempt < self.max_retries:
                    waiting.appendleft((rollout.request, rollout.attempt + 1))
                elif result.status is not None:
                    finished[rollout.request.uid] = self._finish(slot, rollout, result, policy_version)
                    on_finished(len(finished))
                else:
                    continue
                del live[slot]
                engine.release(slot)
        return [finished[request.uid] for request in requests]

    def _start(self, slot: int, request: Request, attempt: int) -> _Rollout:
        episode = self.env.start(request.task)
        prompt = self.dialect.render_prompt(episode.question)
        room = self.env.limits.max_tokens_per_episode
        if len(prompt) >= room:
            raise ValueError(
                f"task {request.task.task_id!r}: its prompt takes {len(prompt)} tokens, the episode {room}; "
                "raise env.max_tokens_per_episode or drop the task"
            )
        self.engine.start(slot, request.uid, prompt)
        rollout = _Rollout(request, episode, prompt, time.monotonic(), attempt, turn_begins=len(prompt))
        rollout.pad_to(len(prompt))
        return rollout

    def _answer(self, ended: Sequence[tuple[int, _Rollout]]) -> Iterator[StepResult]:
        """What the environment makes of the turns that ended; the others go on with the history that follows."""
        began = time.perf_counter()
        results = list(self._pool.map(lambda pair: self._act(*pair), ended))
        self.seconds_in_tools += time.perf_counter() - began
        for (slot, rollout), (result, ids) in zip(ended, results, strict=True):
            if result.status is None:
                self._go_on(slot, rollout, ids)
            yield result

    def _go_on(self, slot: int, rollout: _Rollout, history: list[int]) -> None:
        """Appends what `history` adds to the slot; where it is no extension, the slot begins anew with it."""
        ids = self.engine.ids[slot]
        if history[: len(ids)] == ids:
            self.engine.extend(slot, history[len(ids) :])
        else:
            rollout.close_row(ids)
            self.engine.start(slot, rollout.request.uid, history, len(rollout.closed))
        rollout.pad_to(len(history))
        rollout.turn_begins = len(history)

    def _act(self, slot: int, rollout: _Rollout) -> tuple[StepResult, list[int]]:
        """One turn's result, and the ids that the policy reads next (none where the episode is over)."""
        ids = self.engine.ids[slot]
        sampled, limits, episode = ids[rollout.turn_begins :], self.env.limits, rollout.episode
        action: Call | Malformed | None = None
        history: list[int] = []
        if time.monotonic() - rollout.began > self.timeout_seconds:
            result = episode.fail(TOOL_FAILURE, f"the rollout took longer than {self.timeout_seconds} s")
        elif sampled[-1] == self.engine.stop_id:
            action = self.dialect.parse(sampled)
            result = episode.step(action)
            if result.status is None:
                rollout.exchanges.append((sampled, self.dialect.render_observation(result.observation)))
                history = compress(rollout.prompt, rollout.exchanges, self._placeholder, keep=self.keep_observations)
                if len(history) >= limits.max_tokens_per_episode:
                    result = episode.fail(CONTEXT_LIMIT)
        elif len(sampled) >= limits.max_tokens_per_turn:
            result = episode.fail(TOKEN_LIMIT)
        else:
            result = episode.fail(CONTEXT_LIMIT)
        rollout.turns.append(
            Turn(
                action=self.dialect.tokenizer.decode(sampled),
                observation=result.observation,
                num_tokens=len(sampled),
                is_call=isinstance(action, Call),
                is_malformed=isinstance(action, Malformed),
                error=result.error,
                tool=result.tool,
                seconds=result.seconds,
            )
        )
        return result, history

    def _finish(self, slot: int, rollout: _Rollout, result: StepResult, policy_version: int) -> Trajectory:
        is_action = np.array(rollout.is_action, bool)
        assert result.status is not None
        return Trajectory(
            uid=rollout.request.uid,
            task_id=rollout.request.task.task_id,
            token_ids=np.array(rollout.closed + self.engine.ids[slot], np.int32),
            is_action=is_action,
            behavior_logprob=np.array(rollout.logprob, np.float32),
            policy_version=np.where(is_action, policy_version, -1).astype(np.int32),
            turn=np.array(rollout.turn, np.int32),
            status=result.status,
            reward=result.reward,
            components=dict(result.components),
            ranking=tuple(result.ranking),
            turns=tuple(rollout.turns),
            seconds=time.monotonic() - rollout.began,
            row_starts=tuple(rollout.row_starts),
        )
