"""Plays episodes: the engine decodes, finished turns go to the environment, observations are appended."""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import jax
import numpy as np

from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.data.schema import Task
from searchrl_jax.env import Episode, SearchEnv, StepResult
from searchrl_jax.env.history import compress
from searchrl_jax.env.observations import LEFT_OUT
from searchrl_jax.env.rewards import CONTEXT_LIMIT, TOKEN_LIMIT, TOOL_FAILURE
from searchrl_jax.models.decoder import Params
from searchrl_jax.rollout.engine import Engine, Sampling
from searchrl_jax.rollout.failures import FailureLimit
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.text.calls import Call, Malformed
from searchrl_jax.text.dialect import Dialect


@dataclass(frozen=True)
class Request:
    """One rollout to play. Its tokens follow from the engine's run key, `uid` and the weights alone."""

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
    version: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turn_begins: int = 0
    turns: list[Turn] = field(default_factory=list)
    exchanges: list[tuple[list[int], list[int]]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # ids of the rows before the one that the slot holds
    row_starts: list[int] = field(default_factory=lambda: [0])
    answered: float = 0.0  # when the latest turn's result was there

    def close_row(self, ids: Sequence[int]) -> None:
        """Ends the row of `ids`, which ends with an action; what is sampled next belongs to another."""
        self.closed += ids
        self.row_starts.append(len(self.closed))

    def pad_to(self, length: int) -> None:
        """Marks the tokens of the slot's row up to `length` as not the policy's; the next turn begins there."""
        missing = len(self.closed) + length - len(self.is_action)
        self.is_action += [False] * missing
        self.logprob += [0.0] * missing
        self.version += [-1] * missing
        self.turn += [-1] * missing
        self.turn_begins = length

    def add(self, logprobs: Sequence[float], policy_version: int) -> None:
        """Marks that many further tokens as sampled, by the weights of `policy_version`."""
        self.is_action += [True] * len(logprobs)
        self.logprob += logprobs
        self.version += [policy_version] * len(logprobs)
        self.turn += [len(self.turns)] * len(logprobs)


class Player:
    """Plays requests with one engine and one environment.

    Where the environment keeps but the last observations, older ones give way to a placeholder, and the slot begins
    anew with the history that is left. The limit on the tokens of an episode is then on what the policy reads at a
    time.
    """

    def __init__(
        self,
        engine: Engine,
        env: SearchEnv,
        dialect: Dialect,
        *,
        timeout_seconds: float,
        max_retries: int,
        max_failed_share: float = 1.0,
        threads: int = 8,
    ) -> None:
        """Args:
        timeout_seconds: a rollout older than this has failed.
        max_retries: tries more for a rollout whose tool failed, before it is given back as failed.
        max_failed_share: of the latest rollouts; where more are given back as failed, `TooManyFailures` is raised.
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
        self._left_out = functools.partial(dialect.render_observation, LEFT_OUT)
        self.failures = FailureLimit(max_failed_share)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="tool")
        self.retries = 0
        self.sampled_tokens = 0

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

        The same weights, requests and shapes give the same arrays, bit for bit: see `Flight`, which here waits for
        tools. The slots are free afterwards, whatever happens.

        Args:
            policy_version: learner step of `params`, recorded with each sampled token.
            on_finished: called with the number of finished rollouts whenever it grows.

        Raises:
            ValueError: two requests have one uid, or a prompt leaves no room in its episode.
            TooManyFailures: tools failed too often.
        """
        if len({request.uid for request in requests}) < len(requests):
            raise ValueError(
                "expected a uid for each request, got one twice: both would draw the same tokens; number them"
            )
        waiting = deque(requests)
        flight = Flight(
            self,
            sampling,
            draw=lambda count: [waiting.popleft() for _ in range(min(count, len(waiting)))],
            waits_for_tools=True,
        )
        finished: dict[int, Trajectory] = {}
        try:
            while len(finished) < len(requests):
                for trajectory in flight.tick(params, policy_version):
                    finished[trajectory.uid] = trajectory
                    on_finished(len(finished))
        finally:
            flight.abandon()
        return [finished[request.uid] for request in requests]

    def begin(self, slot: int, request: Request, attempt: int) -> _Rollout:
        """Gives `slot` to a rollout of `request`; `attempt` tries went before it."""
        episode = self.env.start(request.task)
        prompt = self.dialect.render_prompt(episode.question)
        room = self.env.limits.max_tokens_per_episode
        if len(prompt) >= room:
            raise ValueError(
                f"task {request.task.task_id!r}: its prompt takes {len(prompt)} tokens, the episode {room}; "
                "raise env.max_tokens_per_episode or drop the task"
            )
        self.engine.start(slot, request.uid, prompt)
        rollout = _Rollout(request, episode, prompt, time.monotonic(), attempt)
        rollout.pad_to(len(prompt))
        return rollout

    def go_on(self, slot: int, rollout: _Rollout, history: list[int]) -> None:
        """Appends what `history` adds to the slot; where it is no extension, the slot begins anew with it."""
        ids = self.engine.ids[slot]
        if history[: len(ids)] == ids:
            self.engine.extend(slot, history[len(ids) :])
        else:
            rollout.close_row(ids)
            self.engine.start(slot, rollout.request.uid, history, len(rollout.closed))
        rollout.pad_to(len(history))

    def act(self, rollout: _Rollout, ids: Sequence[int]) -> tuple[StepResult, list[int]]:
        """One turn's result, and the ids that the policy reads next (none where the episode is over). Runs on a tool's
        thread.

        Args:
            ids: of the rollout's row so far, the turn included.
        """
        sampled, limits, episode = list(ids[rollout.turn_begins :]), self.env.limits, rollout.episode
        action: Call | Malformed | None = None
        history: list[int] = []
        if time.monotonic() - rollout.began > self.timeout_seconds:
            result = episode.fail(TOOL_FAILURE, f"the rollout took longer than {self.timeout_seconds} s")
        elif sampled[-1] in self.engine.stop_ids:
            try:
                action = self.dialect.parse(sampled)
                result = episode.step(action)
                if result.status is None:
                    rollout.exchanges.append((sampled, self.dialect.render_observation(result.observation, sampled)))
                    history = compress(
                        rollout.prompt, rollout.exchanges, self._left_out, keep=self.env.keep_observations
                    )
            except Exception as error:
                # One bad rollout is masked and counted, as for a tool that fails; many of them stop the run.
                result = episode.fail(TOOL_FAILURE, f"{type(error).__name__}: {error}")
            if result.status is None and len(history) >= limits.max_tokens_per_episode:
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
                detail=result.detail,
            )
        )
        rollout.answered = time.monotonic()
        return result, history

    def end(self, rollout: _Rollout, ids: Sequence[int], result: StepResult) -> Trajectory:
        """The trajectory of a rollout that is over.

        Raises:
            TooManyFailures: it is one failure too many.
        """
        assert result.status is not None
        paid, last = rollout.episode.turn_rewards, len(rollout.turns) - 1
        self.failures.count(result.status == TOOL_FAILURE, result.detail)
        return Trajectory(
            uid=rollout.request.uid,
            task_id=rollout.request.task.task_id,
            token_ids=np.array([*rollout.closed, *ids], np.int32),
            is_action=np.array(rollout.is_action, bool),
            behavior_logprob=np.array(rollout.logprob, np.float32),
            policy_version=np.array(rollout.version, np.int32),
            turn=np.array(rollout.turn, np.int32),
            status=result.status,
            reward=result.reward,
            # A turn whose answer left no room was paid for itself and for the end.
            turn_rewards=() if result.reward is None else (*paid[:last], sum(paid[last:])),
            components=dict(result.components),
            ranking=tuple(result.ranking),
            turns=tuple(rollout.turns),
            seconds=time.monotonic() - rollout.began,
            row_starts=tuple(rollout.row_starts),
        )

    def close(self) -> None:
        """Ends the threads that tools run on, without waiting for a tool that hangs."""
        self.pool.shutdown(wait=False, cancel_futures=True)


class Flight:
    """Rollouts in flight: each has a slot of the engine, and either decodes or waits for a tool.

    With `waits_for_tools` the turns that ended in a chunk are answered side by side and awaited before the next chunk:
    rollouts are scheduled by what they sampled, never by how long a tool took, so all is repeatable bit for bit.
    Without, the others go on decoding meanwhile, and the company that a rollout keeps depends on the clock; what it
    samples does not, up to float rounding.
    """

    def __init__(
        self,
        player: Player,
        sampling: Sampling,
        *,
        draw: Callable[[int], Sequence[Request]],
        waits_for_tools: bool,
        on_answer: Callable[[], None] = lambda: None,
        device: FairLock | None = None,
    ) -> None:
        """Args:
        draw: called with the number of free slots; returns requests to begin, few or more than that.
        on_answer: called on the tool's thread after each answer.
        device: held while the engine computes; None where nothing else does.

        Raises:
            ValueError: the engine plays something else.
        """
        if any(player.engine.ids):
            raise ValueError("expected an engine with free slots, got one at play; pause what it plays first")
        self._player, self._sampling, self._draw = player, sampling, draw
        self._waits_for_tools, self._on_answer, self._device = waits_for_tools, on_answer, device or FairLock()
        self._waiting: deque[tuple[Request, int]] = deque()
        self._live: dict[int, _Rollout] = {}
        self._in_tools: dict[int, Future[tuple[StepResult, list[int]]]] = {}

    @property
    def vacant(self) -> int:
        """Free slots that no request waits for."""
        return max(0, self._player.engine.shapes.slots - len(self._live) - len(self._waiting))

    @property
    def can_advance(self) -> bool:
        """Whether a tick would decode something, or take an answer, of what is in flight."""
        is_any_free = len(self._live) < self._player.engine.shapes.slots
        return (
            len(self._in_tools) < len(self._live)
            or (bool(self._waiting) and is_any_free)
            or any(future.done() for future in self._in_tools.values())
        )

    def tick(self, params: Params, policy_version: int) -> list[Trajectory]:
        """Takes the answers that came, fills free slots, decodes a chunk, and hands on the turns that ended.

        Returns:
            The trajectories that finished.
        """
        finished: list[Trajectory] = []
        player, engine = self._player, self._player.engine
        is_behind = True
        while is_behind:  # by more than one append, as after a swap of weights; the learner comes in between
            asked = time.monotonic()
            with self._device:
                # An update that went first is no fault of the rollouts; and answers have come meanwhile.
                self.wind_clocks(asked)
                finished += self._settle([slot for slot, future in self._in_tools.items() if future.done()])
                self._begin()
                acting = [slot for slot in sorted(self._live) if slot not in self._in_tools]
                is_behind = engine.append_waiting(params)
                if is_behind:
                    jax.block_until_ready(engine.cache)
                elif acting:
                    ended = self._decode(acting, params, policy_version)
        if not acting:
            return finished
        for slot in ended:
            # A copy: while the tool runs the slot may be set aside.
            future = player.pool.submit(player.act, self._live[slot], list(engine.ids[slot]))
            self._in_tools[slot] = future
            future.add_done_callback(lambda _: self._on_answer())
        if self._waits_for_tools:
            wait(self._in_tools.values())
            finished += self._settle(list(self._in_tools))
        return finished

    def _begin(self) -> None:
        """Gives the free slots to requests that wait, or else to new ones."""
        if self.vacant:
            self._waiting.extend((request, 0) for request in self._draw(self.vacant))
        for slot in range(self._player.engine.shapes.slots):
            if self._waiting and slot not in self._live:
                request, attempt = self._waiting.popleft()
                self._live[slot] = self._player.begin(slot, request, attempt)

    def _decode(self, acting: Sequence[int], params: Params, policy_version: int) -> list[int]:
        """Decodes a chunk; the slots of `acting` whose turn it ended."""
        player, engine, limits = self._player, self._player.engine, self._player.env.limits
        budget = np.zeros(engine.shapes.slots, np.int32)
        for slot in acting:
            length = len(engine.ids[slot])
            in_turn = length - self._live[slot].turn_begins
            budget[slot] = min(limits.max_tokens_per_turn - in_turn, limits.max_tokens_per_episode - length)
        chunk = engine.decode(params, budget, self._sampling)
        player.sampled_tokens += int(chunk.count.sum())
        for slot in acting:
            logprobs = chunk.logprobs[slot, : chunk.count[slot]]
            self._live[slot].add(logprobs.tolist(), policy_version)
        return [s for s in acting if chunk.count[s] == budget[s] or engine.ids[s][-1] in engine.stop_ids]

    def _settle(self, slots: Sequence[int]) -> list[Trajectory]:
        """Takes the answers of `slots`, whose tools are done, into their histories; the trajectories that are over."""
        player, engine, finished = self._player, self._player.engine, []
        for slot in sorted(slots):
            rollout = self._live[slot]
            result, history = self._in_tools.pop(slot).result()
            if result.status is None:
                player.go_on(slot, rollout, history)
                continue
            if result.status == TOOL_FAILURE and rollout.attempt < player.max_retries:
                self._waiting.appendleft((rollout.request, rollout.attempt + 1))
                player.retries += 1
            else:
                finished.append(player.end(rollout, engine.ids[slot], result))
            del self._live[slot]
            engine.release(slot)
        return finished

    def wind_clocks(self, since: float) -> None:
        """Takes the time since `since` from the age of every rollout that nobody played meanwhile. Tools went on."""
        now = time.monotonic()
        for slot, rollout in self._live.items():
            future = self._in_tools.get(slot)
            if future is None:
                rollout.began += now - since
            elif future.done():
                rollout.began += now - max(since, rollout.answered)

    def abandon(self) -> None:
        """Frees the slots and drops what is in flight."""
        for future in self._in_tools.values():
            future.cancel()
        for slot in self._live:
            self._player.engine.release(slot)
        self._waiting.clear()
        self._live.clear()
        self._in_tools.clear()
