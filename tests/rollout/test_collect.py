"""Episodes played by an engine: layout of a trajectory, statuses, retries, repeatability."""

import gc
from collections import deque

import jax
import numpy as np
import pytest

from searchrl_jax.env import Limits, RewardSpec
from searchrl_jax.retrieval import Hit
from searchrl_jax.rollout.collect import Player, Request, _Rollout
from searchrl_jax.rollout.engine import Chunk, Engine, Sampling, Shapes
from searchrl_jax.testing.tiny import (
    TOOLS,
    tiny_decoder_config,
    tiny_dialect,
    tiny_env,
    tiny_params,
    tiny_tasks,
)
from searchrl_jax.text.hermes import call_text, search_call, submit_call

DIALECT = tiny_dialect()
TOKENIZER, STOP = DIALECT.tokenizer, DIALECT.stop_id
TASKS = tiny_tasks()
CONFIG = tiny_decoder_config(TOKENIZER.vocab_size)
PARAMS = tiny_params(CONFIG, 3)
# Ends its turns often, so that an untrained policy sees every limit.
PARAMS = {**PARAMS, "embedding": PARAMS["embedding"].at[STOP].multiply(4)}


class Scripted:
    """An engine whose policy says what the script of a uid says, with log-probability -id / 1000."""

    def __init__(self, scripts, slots=2, chunk=5, capacity=256):
        self.scripts, self.stop_ids = scripts, (STOP,)
        self.shapes = Shapes(slots, capacity, chunk, (slots,), (64,), (256,))
        self.ids = [[] for _ in range(slots)]
        self.left = [deque() for _ in range(slots)]

    def start(self, slot, uid, ids, offset=0):
        self.ids[slot] = list(ids)
        if not offset:  # else the history has changed, and the policy goes on
            self.left[slot] = deque(self.scripts[uid])

    def extend(self, slot, ids):
        self.ids[slot].extend(ids)

    def release(self, slot):
        self.ids[slot] = []

    def append_waiting(self, params):
        return False

    def decode(self, params, budget, sampling):
        chunk = Chunk(
            *(np.zeros((len(budget), self.shapes.chunk), t) for t in (int, float)), np.zeros(len(budget), int)
        )
        for slot in np.flatnonzero(budget):
            while chunk.count[slot] < min(budget[slot], self.shapes.chunk):
                token = self.left[slot].popleft()
                chunk.tokens[slot, chunk.count[slot]] = token
                chunk.logprobs[slot, chunk.count[slot]] = -token / 1000
                chunk.count[slot] += 1
                self.ids[slot].append(token)
                if token == STOP:
                    break
        return chunk


def spelled(call):
    """The call's ids with every character a piece of its own, as no tokenizer would write it."""
    control = TOKENIZER.control_ids
    body = [TOKENIZER.encode(character)[0] for character in call_text(call)]
    return [control["<tool_call>"], *body, control["</tool_call>"], STOP]


SEARCH = DIALECT.render_call(search_call(TOOLS[0], "red fruit"))
SUBMIT = DIALECT.render_call(submit_call([1]))
LIMITS = Limits(max_turns=3, max_tokens_per_turn=80, max_tokens_per_episode=256)


def play(
    scripts, tasks=None, limits=LIMITS, max_retries=0, retrievers=None, keep_observations=0, reward=None, **options
):
    engine = Scripted(scripts, **options)
    env = tiny_env(DIALECT, limits, retrievers, keep_observations=keep_observations)
    env.reward = reward or env.reward
    player = Player(
        engine,
        env,
        DIALECT,
        timeout_seconds=600,
        max_retries=max_retries,
    )
    requests = [Request(uid, task) for uid, task in zip(scripts, tasks or TASKS, strict=False)]
    found = player.play(None, requests, Sampling(), policy_version=4)
    assert engine.ids == [[] for _ in engine.ids]
    return found


def test_the_layout_of_a_trajectory_is_literal():
    (got,) = play({11: [*SEARCH, *SUBMIT]})
    prompt = DIALECT.render_prompt(TASKS[0].query)
    seen = DIALECT.render_observation(got.turns[0].observation)
    assert got.token_ids.tolist() == [*prompt, *SEARCH, *seen, *SUBMIT]
    p, s, o, e = len(prompt), len(SEARCH), len(seen), len(SUBMIT)
    assert got.is_action.tolist() == [False] * p + [True] * s + [False] * o + [True] * e
    assert got.turn.tolist() == [-1] * p + [0] * s + [-1] * o + [1] * e
    assert got.policy_version.tolist() == [-1] * p + [4] * s + [-1] * o + [4] * e
    want = np.where(got.is_action, -got.token_ids / 1000, 0)
    np.testing.assert_allclose(got.behavior_logprob, want, rtol=1e-6)
    assert (got.uid, got.task_id, got.status, got.reward, got.ranking) == (
        11, "known-apple", "submitted", 1.0, ("tiny.apple",)
    )  # fmt: skip
    assert got.is_valid and got.is_submitted and got.ndcg == 1.0 and got.num_action_tokens == s + e
    first, last = got.turns
    assert first.action == TOKENIZER.decode(SEARCH) and first.tool == TOOLS[0] and first.is_call
    assert (first.num_tokens, last.num_tokens) == (s, e) and "tiny.apple" in first.observation


def test_sampled_ids_are_never_tokenised_again():  # fault 1
    odd = spelled(search_call(TOOLS[0], "red fruit"))
    assert TOKENIZER.encode(TOKENIZER.decode(odd[1:-2])) != odd[1:-2]
    (got,) = play({1: [*odd, *SUBMIT]}, limits=Limits(3, 120, 256))
    assert got.token_ids[got.is_action].tolist() == [*odd, *SUBMIT]
    assert got.status == "submitted" and got.reward == 1.0


def test_a_stop_that_falls_on_the_last_token_of_the_budget_ends_the_turn():
    limits = Limits(max_turns=3, max_tokens_per_turn=len(SEARCH), max_tokens_per_episode=256)
    (got,) = play({1: [*SEARCH, *SUBMIT]}, limits=limits)
    assert got.status == "submitted"


@pytest.mark.parametrize(
    ("script", "limits", "status", "turns"),
    [
        ([*SEARCH, *SEARCH, *SEARCH], LIMITS, "turn_limit", 3),
        ([STOP, STOP, STOP], LIMITS, "turn_limit", 3),
        (SEARCH, Limits(3, len(SEARCH) - 1, 256), "token_limit", 1),
        ([*SEARCH, *SUBMIT], Limits(3, 80, 21 + len(SEARCH) - 1), "context_limit", 1),
        ([*SEARCH, *SUBMIT], Limits(3, 80, 21 + len(SEARCH) + 5), "context_limit", 1),
    ],
)
def test_each_limit_has_its_label(script, limits, status, turns):
    (got,) = play({1: script}, limits=limits)
    assert (got.status, got.reward, len(got.turns)) == (status, -1.0, turns)
    assert len(got.token_ids) <= limits.max_tokens_per_episode and got.is_valid and got.ndcg == 0
    assert got.is_action[-1], "an observation that nobody answers is not part of a trajectory"


@pytest.mark.parametrize(
    ("script", "limits", "paid"),
    [
        ([STOP, *SEARCH, *SUBMIT], LIMITS, (-0.5, 0.0, 1.0)),
        ([STOP, STOP, STOP], LIMITS, (-0.5, -0.5, -1.5)),
        ([STOP, *SEARCH], Limits(3, len(SEARCH) - 1, 256), (-0.5, -1.0)),  # the turn never came to its end
        ([STOP], Limits(3, 80, 21 + 1 + 2), (-1.5,)),  # answered, but the answer leaves no room
    ],
)
def test_every_turn_has_its_reward_whatever_ends_the_episode(script, limits, paid):
    (got,) = play({1: script}, limits=limits, reward=RewardSpec(malformed_reward=-0.5))
    assert got.turn_rewards == got.rewards_by_turn == paid
    assert got.reward == sum(paid) and got.ndcg == max(paid[-1], 0.0)


class Failing:
    """A retriever that fails `times` times, then finds the first document."""

    def __init__(self, times):
        self.left, self.calls = times, 0

    def search(self, query, k=10, where=None):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise ConnectionError("refused")
        return [Hit("tiny.apple", 1.0)]


def test_a_failing_tool_is_retried_and_then_masked():  # fault 28
    tool = Failing(99)
    broken, fine = play({1: SEARCH, 2: [STOP] * 3}, max_retries=2, retrievers={TOOLS[0]: tool})
    assert (broken.status, broken.reward, broken.is_valid, tool.calls) == ("tool_failure", None, False, 3)
    assert broken.uid == 1 and fine.status == "turn_limit" and fine.is_valid
    tool = Failing(2)
    (got,) = play({1: [*SEARCH, *SUBMIT]}, max_retries=2, retrievers={TOOLS[0]: tool})
    assert (got.status, got.reward, tool.calls) == ("submitted", 1.0, 3)
    assert got.token_ids[got.is_action].tolist() == [*SEARCH, *SUBMIT], "a retry begins anew"


def test_a_rollout_out_of_time_is_masked_and_a_closed_player_runs_no_tool():
    player = Player(Scripted({1: SEARCH}), tiny_env(DIALECT, LIMITS), DIALECT, timeout_seconds=0, max_retries=0)
    (got,) = player.play(None, [Request(1, TASKS[0])], Sampling(), policy_version=0)
    assert (got.status, got.reward) == ("tool_failure", None) and "longer than 0 s" in got.turns[0].detail
    player.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        player.play(None, [Request(1, TASKS[0])], Sampling(), policy_version=0)
    assert player.engine.ids == [[], []], "slots are freed"


def test_more_requests_than_slots_come_back_in_order_and_nothing_stays():  # fault 36
    scripts = {uid: [*SEARCH, *SUBMIT] if uid % 3 else [STOP] * 3 for uid in range(7)}
    got = play(scripts)
    assert [trajectory.uid for trajectory in got] == list(range(7))
    assert [trajectory.task_id for trajectory in got] == [task.task_id for task in TASKS[:7]]
    assert [trajectory.status for trajectory in got] == ["submitted" if uid % 3 else "turn_limit" for uid in range(7)]
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, _Rollout)]


def test_a_prompt_without_room_and_repeated_uids_are_refused():  # fault 10
    with pytest.raises(ValueError, match="'known-apple': its prompt takes 21 tokens, the episode 21"):
        play({1: SUBMIT}, limits=Limits(3, 80, 21))
    with pytest.raises(ValueError, match="at most the 100 tokens of an engine's slot, got 256"):
        play({1: SUBMIT}, capacity=100)
    player = Player(Scripted({1: SUBMIT}), tiny_env(DIALECT, LIMITS), DIALECT, timeout_seconds=600, max_retries=0)
    with pytest.raises(ValueError, match="got one twice"):
        player.play(None, [Request(1, TASKS[0]), Request(1, TASKS[1])], Sampling(), policy_version=0)


def test_an_untrained_policy_plays_the_same_whatever_the_slots():
    limits = Limits(max_turns=3, max_tokens_per_turn=12, max_tokens_per_episode=240)
    requests = [Request(100 + i, task) for i, task in enumerate(TASKS[:8])]
    played = {}
    for slots in (2, 5):
        engine = Engine(CONFIG, Shapes(slots, 240, 4, (slots,), (64,), (256,)), (STOP,), jax.random.key(1))
        player = Player(engine, tiny_env(DIALECT, limits), DIALECT, timeout_seconds=600, max_retries=0)
        played[slots] = player.play(PARAMS, requests, Sampling(), policy_version=0)
        again = player.play(PARAMS, requests, Sampling(), policy_version=0)
        for one, two in zip(played[slots], again, strict=True):
            np.testing.assert_array_equal(one.token_ids, two.token_ids)
            np.testing.assert_array_equal(one.behavior_logprob, two.behavior_logprob)
        assert engine.ids == [[]] * slots
    for few, many in zip(played[2], played[5], strict=True):
        assert few.token_ids.tolist() == many.token_ids.tolist() and few.status == many.status
        np.testing.assert_allclose(few.behavior_logprob, many.behavior_logprob, atol=1e-4)
    statuses = {trajectory.status for trajectory in played[2]}
    assert {"token_limit", "turn_limit"} <= statuses
    for got in played[2]:
        sizes = [turn.num_tokens for turn in got.turns]
        assert sum(sizes) == got.num_action_tokens and max(sizes) <= 12 and len(got.token_ids) <= 240
        if got.status == "token_limit":
            assert sizes[-1] == 12 and got.token_ids[-1] != STOP
        if got.status == "turn_limit":
            assert len(sizes) == 3 and got.token_ids[-1] == STOP


def test_compression_makes_room_in_an_episode():
    script = {1: [*SEARCH, *SEARCH, *SUBMIT]}
    (whole,) = play(script, limits=Limits(3, 80, 256))
    (compressed,) = play(script, limits=Limits(3, 80, 256), keep_observations=1)
    assert whole.row_starts == (0,) and len(compressed.row_starts) == 2
    assert compressed.status == whole.status == "submitted" and compressed.ranking == whole.ranking
    assert compressed.token_ids[compressed.is_action].tolist() == script[1]
    longest = max(row.stop - row.start for row in compressed.rows)
    assert longest < len(whole.token_ids)
    limits = Limits(3, 80, longest)
    assert play(script, limits=limits)[0].status == "context_limit"
    assert play(script, limits=limits, keep_observations=1)[0].status == "submitted"
    (cut,) = play(script, limits=Limits(3, 80, longest - 1), keep_observations=1)
    assert cut.status == "context_limit" and cut.is_action[-1]


def test_a_retry_forgets_the_rows_of_the_failed_try():
    class ThirdFails(Failing):
        def search(self, query, k=10, where=None):
            if self.calls == 2:
                self.calls += 1
                raise ConnectionError("refused")
            return super().search(query, k, where)

    script = {1: [*SEARCH, *SEARCH, *SEARCH, *SUBMIT]}
    limits = Limits(4, 80, 256)
    (got,) = play(script, limits=limits, max_retries=1, retrievers={TOOLS[0]: ThirdFails(0)}, keep_observations=1)
    (plain,) = play(script, limits=limits, retrievers={TOOLS[0]: Failing(0)}, keep_observations=1)
    assert got.status == "submitted" and got.row_starts == plain.row_starts
    np.testing.assert_array_equal(got.token_ids, plain.token_ids)
