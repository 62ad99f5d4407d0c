"""Episodes whose history is compressed: what the policy reads, which rows are trained, and that both agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.env import Limits
from searchrl_jax.env.observations import LEFT_OUT
from searchrl_jax.rl.aggregate import aggregate, divide
from searchrl_jax.rollout.batch import RowShape, pack
from searchrl_jax.rollout.collect import Flight, Player, Request
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes
from searchrl_jax.testing.tiny import (
    tiny_decoder_config,
    tiny_dialect,
    tiny_env,
    tiny_params,
    tiny_tasks,
)
from searchrl_jax.train.learn import parts_of, with_tables
from searchrl_jax.train.step import action_log_probs

DIALECT = tiny_dialect()
STOP = DIALECT.stop_id
TASKS = tiny_tasks()
CONFIG = tiny_decoder_config(DIALECT.tokenizer.vocab_size)
PARAMS = tiny_params(CONFIG, 3)
# Ends its turns often, so that an untrained policy plays several.
PARAMS = {**PARAMS, "embedding": PARAMS["embedding"].at[STOP].multiply(4)}
GONE = DIALECT.render_observation(LEFT_OUT)
LIMITS = Limits(max_turns=4, max_tokens_per_turn=12, max_tokens_per_episode=240)


def play(keep, *, slots=3, sampling=Sampling(), limits=LIMITS, tasks=TASKS[:6]):  # noqa: B008 (frozen)
    engine = Engine(CONFIG, Shapes(slots, 240, 4, (slots,), (64,), (256,)), (STOP,), jax.random.key(1))
    player = Player(
        engine, tiny_env(DIALECT, limits, keep_observations=keep), DIALECT, timeout_seconds=600, max_retries=0
    )
    requests = [Request(100 + i, task) for i, task in enumerate(tasks)]
    return player.play(PARAMS, requests, sampling, policy_version=0)


@pytest.fixture(scope="module")
def played():
    return {keep: play(keep) for keep in (0, 1, 2)}


def actions_of(trajectory):
    """Ids of each turn, in order."""
    turns = trajectory.turn[trajectory.is_action]
    return [trajectory.token_ids[trajectory.is_action][turns == t].tolist() for t in range(len(trajectory.turns))]


@pytest.mark.parametrize("keep", [1, 2])
def test_each_row_is_what_the_policy_read_and_each_action_stands_in_one(played, keep):
    assert max(len(trajectory.row_starts) for trajectory in played[keep]) == 4 - keep
    for trajectory, task in zip(played[keep], TASKS, strict=False):
        actions = actions_of(trajectory)
        seen = [DIALECT.render_observation(turn.observation) for turn in trajectory.turns]
        marked = []
        for row in trajectory.rows:
            ids, is_action = trajectory.token_ids[row].tolist(), trajectory.is_action[row]
            turns = sorted(set(trajectory.turn[row][is_action].tolist()))
            marked += turns
            # The last turn of a row saw all actions before it, and the last observations.
            last = turns[-1]
            expected = DIALECT.render_prompt(task.query)
            for t in range(last):
                expected += actions[t] + (seen[t] if t >= last - keep else GONE)
            assert ids == expected + actions[last]
            assert [ids[i] for i in np.flatnonzero(is_action)] == [i for t in turns for i in actions[t]]
        assert marked == list(range(len(trajectory.turns)))
        assert [turn.num_tokens for turn in trajectory.turns] == list(map(len, actions))
        assert (trajectory.behavior_logprob[trajectory.is_action] <= 0).all()
        assert (trajectory.policy_version == np.where(trajectory.is_action, 0, -1)).all()


def test_where_nothing_is_left_out_all_is_as_without_compression(played):
    for plain, kept in zip(played[0], play(9), strict=True):
        assert plain.row_starts == kept.row_starts == (0,)
        np.testing.assert_array_equal(plain.token_ids, kept.token_ids)
        np.testing.assert_array_equal(plain.behavior_logprob, kept.behavior_logprob)
    for plain, compressed in zip(played[0], played[1], strict=True):
        first, second = (trajectory.token_ids[trajectory.is_action] for trajectory in (plain, compressed))
        until = sum(turn.num_tokens for turn in plain.turns[:2])
        np.testing.assert_array_equal(first[:until], second[:until], "nothing is left out before the third turn")


def test_what_is_sampled_does_not_depend_on_the_slots(played):
    for few, many in zip(play(1, slots=2), played[1], strict=True):
        assert few.token_ids.tolist() == many.token_ids.tolist() and few.row_starts == many.row_starts
        np.testing.assert_allclose(few.behavior_logprob, many.behavior_logprob, atol=1e-4)


def test_what_is_sampled_does_not_depend_on_what_is_played_in_between(played):
    engine = Engine(CONFIG, Shapes(3, 240, 4, (3,), (64,), (256,)), (STOP,), jax.random.key(1))
    players = [
        Player(engine, tiny_env(DIALECT, LIMITS, keep_observations=1), DIALECT, timeout_seconds=600, max_retries=0)
        for _ in range(2)
    ]
    waiting = [Request(100 + i, task) for i, task in enumerate(TASKS[:6])]
    flight = Flight(players[0], Sampling(), draw=lambda n: [waiting.pop(0) for _ in waiting[:n]], waits_for_tools=True)
    finished = {}
    while len(finished) < 6:
        finished |= {trajectory.uid: trajectory for trajectory in flight.tick(PARAMS, 0)}
        aside = engine.set_aside()
        if len(finished) == 2:
            players[1].play(PARAMS, [Request(7, TASKS[6])], Sampling(), policy_version=0)
        engine.put_back(aside)
    for one, other in zip((finished[uid] for uid in sorted(finished)), played[1], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.row_starts == other.row_starts
        np.testing.assert_allclose(one.behavior_logprob, other.behavior_logprob, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9)])
def test_the_learner_gives_every_action_the_probability_it_was_sampled_with(sampling):  # faults 3, 4, 21
    groups = [play(1, sampling=sampling)]
    samples = [part.sample for part in parts_of(groups, np.ones((1, 6), bool))]
    assert len(samples) == sum(len(trajectory.row_starts) for trajectory in groups[0]) > 6
    seen = 0
    for rows in pack(samples, [RowShape(2, 240, 48)]):
        logprob, _ = action_log_probs(
            CONFIG, PARAMS, jax.tree.map(jnp.asarray, rows), temperature=sampling.temperature, top_p=sampling.top_p
        )
        gap = np.where(rows.is_action, np.asarray(logprob) - rows.behavior_logprob, 0)
        np.testing.assert_allclose(gap, 0, atol=1e-4)
        seen += int(rows.is_action.sum())
    assert seen == sum(trajectory.num_action_tokens for trajectory in groups[0])


def test_no_random_key_is_used_twice_in_a_trajectory(monkeypatch):
    used = []

    class Watched(Engine):
        def decode(self, params, budget, sampling):
            before = [len(ids) for ids in self.ids]
            chunk = super().decode(params, budget, sampling)
            for slot in np.flatnonzero(chunk.count):
                first = int(self.offsets[slot]) + before[slot]
                used.extend((int(self.uids[slot]), first + i) for i in range(chunk.count[slot]))
            return chunk

    monkeypatch.setitem(globals(), "Engine", Watched)
    trajectories = play(1)
    places = [(t.uid, int(at)) for t in trajectories for at in np.flatnonzero(t.is_action)]
    assert len(set(used)) == len(used) and sorted(used) == sorted(places)


def test_the_key_of_a_token_is_that_of_its_place_in_the_trajectory():
    """With an offset the engine draws what it would draw there, whatever stands before."""

    def draw(offset, length):
        engine = Engine(CONFIG, Shapes(1, 240, 4, (1,), (64,), (256,)), (STOP,), jax.random.key(1))
        engine.start(0, 5, [7] * length, offset)
        engine.flush(flat)
        return engine.decode(flat, np.array([4], np.int32), Sampling()).tokens.tolist()

    flat = {**PARAMS, "embedding": jnp.zeros_like(PARAMS["embedding"])}  # every context says the same
    assert draw(0, 30) == draw(20, 10) != draw(0, 10)


def test_each_trajectory_keeps_its_weight_whatever_its_rows(played):  # fault 5
    """The loss of compressed trajectories, in many rows, is that of the same tokens in one row each."""
    rewards = np.array([[1.0, 0.0, 0.5, 0.25, 0.75, 0.0]], np.float32)
    groups = [played[1]]
    advantages = rewards - rewards.mean()
    table = np.tile(advantages.T, (1, max(trajectory.num_action_tokens for trajectory in played[1])))
    samples = [with_tables(part, {"advantage": table}) for part in parts_of(groups, np.ones((1, 6), bool))]
    assert len(samples) == sum(len(trajectory.row_starts) for trajectory in played[1]) > 6
    tokens = np.array([trajectory.num_action_tokens for trajectory in played[1]])
    weights = {"token_mean": tokens / tokens.sum(), "sequence_mean": np.full(6, 1 / 6), "constant": tokens / (6 * 50)}
    for how, weight in weights.items():
        parts = [
            aggregate(
                jnp.asarray(sample.advantage)[None] * 2,
                jnp.asarray(sample.is_action)[None],
                how,
                trajectory_tokens=jnp.full((1, len(sample.is_action)), sample.trajectory_tokens),
                normalizer=50.0 if how == "constant" else None,
            )
            for sample in samples
        ]
        found = divide(sum(total for total, _ in parts), sum(count for _, count in parts))
        assert float(found) == pytest.approx(float((2 * advantages[0] * weight).sum()), abs=1e-5)
