"""The source that plays while the learner updates: ages, look-ahead, swaps, pauses, failures, resumption, memory."""

import dataclasses
import gc
import threading
import time
from collections import defaultdict

import jax
import numpy as np
import pytest
from test_collect import CONFIG, DIALECT, LIMITS, PARAMS, SEARCH, STOP, SUBMIT, TASKS, Failing, Scripted

from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.data.stream import TaskStream
from searchrl_jax.env import Limits
from searchrl_jax.env.tools import ToolRunner
from searchrl_jax.models.decoder import forward, unembed
from searchrl_jax.ops.sampling import processed_log_probs
from searchrl_jax.retrieval import Hit
from searchrl_jax.rollout.asynchronous import AsynchronousSource
from searchrl_jax.rollout.collect import Flight, Player, Request
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes
from searchrl_jax.rollout.failures import TooManyFailures
from searchrl_jax.rollout.source import Plan, SynchronousSource
from searchrl_jax.rollout.storage import load_groups, save_groups
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.testing.tiny import TOOLS, tiny_env, tiny_params

OTHER = tiny_params(CONFIG, 5)
P, G = 2, 3


class Busy(Scripted):
    """A scripted engine without end: a third of the uids fail fast, the others search and submit."""

    def __init__(self, slots=4, fails_at=None):
        super().__init__({}, slots=slots)
        self.scripts = _Scripts()
        self.fails_at, self.decoded, self.forgotten = fails_at, 0, 0

    def forget(self):
        self.forgotten += 1

    def set_aside(self):
        aside, n = (self.ids, self.left), len(self.ids)
        self.ids, self.left = [[] for _ in range(n)], [[] for _ in range(n)]
        return aside

    def put_back(self, aside):
        self.ids, self.left = aside

    def decode(self, params, budget, sampling):
        self.decoded += 1
        if self.decoded == self.fails_at:
            raise MemoryError("the device is full")
        return super().decode(params, budget, sampling)


class _Scripts(dict):
    def __missing__(self, uid):
        return [*SEARCH, *SUBMIT] if uid % 3 else [STOP] * 3


class Slow:
    """A retriever that finds the first document after some time, up to `seconds`."""

    def __init__(self, seconds, seed=0):
        self.seconds, self.rng, self.lock = seconds, np.random.default_rng(seed), threading.Lock()

    def search(self, query, k=10, where=None):
        with self.lock:
            seconds = self.seconds * self.rng.random()
        time.sleep(seconds)
        return [Hit("tiny.apple", 1.0)]


def make_player(engine=None, tool=None, **options):
    options = {"timeout_seconds": 60, "max_retries": 0} | options
    retrievers = None if tool is None else dict.fromkeys(TOOLS, tool)
    env = tiny_env(DIALECT, LIMITS, retrievers)
    env.runner = ToolRunner(60, 0)  # on a busy machine a tool may wait long for its turn
    return Player(engine or Busy(), env, DIALECT, **options)


@pytest.fixture
def make(tmp_path):
    """Makes sources, and closes them."""
    made = []

    def build(bound, steps=8, player=None, **options):
        player = player or make_player()
        stream = TaskStream(TASKS, P, seed=0)
        by_id = {task.task_id: task for task in TASKS}
        plan = Plan(P, G, steps)
        source = AsynchronousSource(
            player, stream, by_id, Sampling(), plan, max_steps_off_policy=bound, folder=tmp_path, **options
        )
        made.append((source, player))
        return source

    yield build
    for source, player in made:
        source.close()
        assert not any(player.engine.ids), "slots are freed"
        player.close()


def numbers(taken):
    return [group[0].uid // G for group in taken.groups]


def expected_tasks(steps):
    stream = TaskStream(TASKS, P, seed=0)
    return [task.task_id for _ in range(steps) for task in stream.next_batch()]


def assert_same(one, two):
    assert (one.uid, one.task_id, one.status, one.reward, one.ranking, one.row_starts) == (
        two.uid, two.task_id, two.status, two.reward, two.ranking, two.row_starts
    )  # fmt: skip
    for name in ("token_ids", "is_action", "behavior_logprob", "policy_version", "turn"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name, strict=True)


def make_engine(slots=4, chunk=4):
    return Engine(CONFIG, Shapes(slots, 240, chunk, (slots,), (64,), (256,)), (STOP,), jax.random.key(1))


@pytest.mark.parametrize("keep", [0, 1])
def test_with_bound_0_all_is_bit_for_bit_as_in_turns(tmp_path, keep):
    limits = Limits(max_turns=3, max_tokens_per_turn=12, max_tokens_per_episode=240)
    found, streams = [], []
    for kind in ("in turns", "on a thread"):
        player = Player(
            make_engine(),
            tiny_env(DIALECT, limits, keep_observations=keep),
            DIALECT,
            timeout_seconds=600,
            max_retries=0,
        )
        stream, plan = TaskStream(TASKS, P, seed=0, curriculum=True), Plan(P, G, 3)
        source = (
            SynchronousSource(player, stream, Sampling(), plan)
            if kind == "in turns"
            else AsynchronousSource(
                player, stream, {}, Sampling(), plan, max_steps_off_policy=0, folder=tmp_path
            )
        )  # fmt: skip
        weights = (PARAMS, OTHER, PARAMS)
        found.append([source.take(weights[version], version) for version in range(3)])
        source.close()
        player.close()
        streams.append(stream.state())
    assert streams[0] == streams[1] and streams[0]["rates"], "both told the stream of the pass rates"
    for one, two in zip(*found, strict=True):
        assert list(one.tasks) == list(two.tasks) and one.metrics["staleness/0"] == two.metrics["staleness/0"] == 1
        for left, right in zip(one.trajectories, two.trajectories, strict=True):
            assert_same(left, right)


@pytest.mark.parametrize("bound", [1, 3])
def test_ages_stay_in_the_bound_and_every_task_is_trained_once(make, bound):
    player = make_player(tool=Slow(0.02))
    source = make(bound, steps=8, player=player)
    seen, ages, tasks = [], [], {}
    for version in range(8):
        taken = source.take(None, version)
        begun = source._taken + len(source._groups)
        assert begun <= (version + bound + 1) * P, "look-ahead"
        assert taken.metrics["dropped_groups"] == 0, "nothing is played to be thrown away"
        assert sum(taken.metrics[f"staleness/{age}"] for age in range(bound + 1)) == pytest.approx(1)
        ages += [version - int(t.policy_version[t.is_action].min()) for t in taken.trajectories]
        seen += numbers(taken)
        tasks |= {n: task.task_id for n, task in zip(numbers(taken), taken.tasks, strict=True)}
        for group, task in zip(taken.groups, taken.tasks, strict=True):
            assert [t.uid % G for t in group] == list(range(G)) and {t.task_id for t in group} == {task.task_id}
        time.sleep(0.03)
    assert sorted(seen) == list(range(16)) and [tasks[n] for n in range(16)] == expected_tasks(8)
    assert 0 < max(ages) <= bound
    assert player.engine.forgotten >= 1, "new weights, new cache"


def test_a_tool_that_is_slow_holds_up_nobody_else_until_its_group_is_due(make):
    opened = threading.Event()

    class Gate:
        calls = 0

        def search(self, query, k=10, where=None):
            Gate.calls += 1
            if Gate.calls == 1:
                opened.wait(20)
            return [Hit("tiny.apple", 1.0)]

    source = make(1, steps=4, player=make_player(tool=Gate()))
    first = numbers(source.take(None, 0))
    assert 0 not in first, "the group of the slow tool is left behind"
    threading.Timer(0.2, opened.set).start()
    began = time.monotonic()
    assert 0 in numbers(source.take(None, 1)), "waited for, since it would be too old at the next step"
    assert time.monotonic() - began > 0.1


def aged(uid, versions):
    """A trajectory of a prompt token and one action token per version."""
    length = 1 + len(versions)
    return Trajectory(
        uid, TASKS[0].task_id, np.arange(length, dtype=np.int32), np.arange(length) > 0,
        np.full(length, -0.1, np.float32), np.array([-1, *versions], np.int32), np.zeros(length, np.int32),
        "turn_limit", -1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("bound", "dropped"), [(4, 1), (5, 0)])
def test_time_in_the_queue_counts_and_a_group_is_dropped_whole(make, tmp_path, bound, dropped):  # fault 25
    waiting = {0: [aged(0, [3, 5]), aged(1, [5]), aged(2, [6])], 1: [aged(3 + g, [6]) for g in range(G)]}
    save_groups(tmp_path / "step_000008.npz", waiting)
    source = make(bound, steps=20)
    state = {"stream": TaskStream(TASKS, P, 0).state(), "next_number": 2, "taken": 16, "to_begin": []}
    source.restore(8, state)
    taken = source.take(None, 8)
    assert taken.metrics["dropped_groups"] == dropped and 1 in numbers(taken)
    assert taken.metrics["staleness/max"] == (2 if dropped else 5)
    version = 8
    while 0 not in numbers(taken):
        taken = source.take(None, version := version + 1)
    assert version == 8 or dropped
    oldest = min(t.oldest_version for t in taken.groups[0])
    assert numbers(taken)[0] == 0 and oldest == (8 if dropped else 3), "its prompt came back, under its number"


def test_look_ahead_counts_from_the_learner_s_version_alone(make):  # fault 24
    source = make(2)
    for version, taken, room in ((100, 100 * P, 3 * P), (100, 100 * P - 2, 3 * P + 2), (0, 0, 3 * P)):
        source._taken, source._next_number, source._plan = taken, taken, Plan(P, G, 200)
        source._groups = {}
        begun = 0
        while source._may_begin(version):
            source._groups[taken + begun] = None
            begun += 1
        assert begun == room
    source._groups = {}


def test_an_exception_of_the_worker_is_raised_where_groups_are_awaited(make):  # fault 26
    source = make(3, player=make_player(Busy(fails_at=3)))
    began = time.monotonic()
    with pytest.raises(MemoryError, match="the device is full"):
        for version in range(8):
            source.take(None, version)
    with pytest.raises(MemoryError), source.paused():
        pass
    with pytest.raises(MemoryError):
        source.save(1)
    assert time.monotonic() - began < 5


def test_while_paused_the_engine_is_free_and_nothing_is_lost(make):
    player = make_player(tool=Slow(0.01))
    source = make(2, steps=6, player=player)
    seen = []
    for version in range(6):
        seen += numbers(source.take(None, version))
        with source.paused():
            decoded = player.engine.decoded
            time.sleep(0.02)
            assert player.engine.decoded == decoded and not any(player.engine.ids)
            played = player.play(None, [Request(7, TASKS[0])], Sampling(), policy_version=9)
        assert played[0].status == "submitted"
    assert sorted(seen) == list(range(12))
    with pytest.raises(ValueError, match="pause what it plays first"):
        player.engine.ids[0] = [1]
        player.play(None, [Request(7, TASKS[0])], Sampling(), policy_version=9)
    player.engine.ids[0] = []


def test_the_worker_decodes_between_the_programs_of_the_learner_and_never_beside_them(make):
    player, device = make_player(tool=Slow(0.002)), FairLock()
    source = make(3, steps=4, player=player, device=device)
    between = 0
    for version in range(4):
        source.take(None, version)
        for _ in range(5):
            before = player.engine.decoded
            with device:
                between += player.engine.decoded - before
                decoded = player.engine.decoded
                time.sleep(0.02)
                assert player.engine.decoded == decoded
    assert between > 0


@pytest.mark.parametrize("is_paused", [False, True])
def test_the_time_in_which_the_worker_waits_is_not_the_rollouts(make, is_paused):
    """Slow updates once ran rollouts in flight into `rollout_timeout`."""
    player, device = make_player(tool=Slow(0.02), timeout_seconds=2), FairLock()
    source = make(3, steps=4, player=player, device=device)
    for version in range(4):
        taken = source.take(None, version)
        assert all(t.status != "tool_failure" for t in taken.trajectories)
        with source.paused() if is_paused else device:
            time.sleep(2.2)


def test_a_tool_that_hangs_while_an_update_goes_first_is_still_too_slow(make):
    class Hangs:
        def search(self, query, k=10, where=None):
            time.sleep(0.5)
            return [Hit("tiny.apple", 1.0)]

    player, device = make_player(tool=Hangs(), timeout_seconds=0.4), FairLock()
    source = make(0, steps=1, player=player, device=device)
    held, done = threading.Event(), threading.Event()

    def update():
        while not done.is_set():
            with device:
                held.set()
                time.sleep(0.1)

    learner = threading.Thread(target=update)
    learner.start()
    held.wait()
    taken = source.take(None, 0)
    done.set()
    learner.join()
    searched = [t for t in taken.trajectories if t.uid % 3]
    assert searched and all(t.status == "tool_failure" for t in searched)
    assert all(t.seconds > 0.5 for t in searched)


def test_only_what_an_update_changes_is_copied(make):
    source = make(1, steps=1, frozen={"base": OTHER["final_norm"]})
    params = {"base": OTHER["final_norm"], "lora": OTHER["embedding"]}
    source.take(params, 0)
    handed, _ = source._weights
    assert all(one is two for one, two in zip(*map(jax.tree.leaves, (handed["base"], params["base"])), strict=True))
    assert handed["lora"] is not params["lora"] and np.array_equal(handed["lora"], params["lora"])


def test_a_stopped_source_goes_on_with_what_was_finished_and_replays_the_rest(make, tmp_path):
    source = make(3, steps=8, player=make_player(tool=Slow(0.01)))
    seen = []
    for version in range(3):
        seen += numbers(source.take(None, version))
    deadline = time.monotonic() + 20
    while not any(group.finished_at for group in source._groups.values()) and time.monotonic() < deadline:
        time.sleep(0.005)
    state = source.save(3)
    source.close()
    stored = load_groups(tmp_path / "step_000003.npz")
    assert stored and sorted([*seen, *stored, *(n for n, _ in state["to_begin"])]) == list(range(state["next_number"]))

    again = make(3, steps=8)
    again.restore(3, state)
    for version in range(3, 8):
        taken = again.take(None, version)
        for number, group in zip(numbers(taken), taken.groups, strict=True):
            for left, right in zip(group, stored.get(number, group), strict=True):
                assert_same(left, right)
        seen += numbers(taken)
        again.save(version + 1)
    assert sorted(seen) == list(range(16))
    assert len(list(tmp_path.glob("step_*.npz"))) == 2


def test_groups_on_disk_are_as_they_were(tmp_path):
    player = make_player()
    played = player.play(None, [Request(n, TASKS[n]) for n in range(4)], Sampling(), policy_version=3)
    player.close()
    played[0] = dataclasses.replace(played[0], row_starts=(0, 40))
    for groups in ({}, {5: played[:2], 1: played[2:]}):
        save_groups(tmp_path / "groups.npz", groups)
        found = load_groups(tmp_path / "groups.npz")
        assert list(found) == list(groups)
        for number in groups:
            for left, right in zip(found[number], groups[number], strict=True):
                assert_same(left, right)
                assert left.turns == right.turns and left.to_json() == right.to_json()


def test_a_bad_rollout_is_masked_and_many_stop_the_run(make, monkeypatch):
    player = make_player(max_failed_share=0.1)
    step = type(player.env.start(TASKS[0])).step
    bad = {TASKS[3].task_id}

    def failing(episode, action):
        if episode.task.task_id in bad:
            raise KeyError("a bug of the environment")
        return step(episode, action)

    monkeypatch.setattr(type(player.env.start(TASKS[0])), "step", failing)
    played = player.play(None, [Request(n, task) for n, task in enumerate(TASKS)], Sampling(), policy_version=0)
    assert [t.status == "tool_failure" for t in played] == [n == 3 for n in range(len(TASKS))]
    assert "a bug of the environment" in played[3].turns[0].detail
    bad |= {task.task_id for task in TASKS}
    with pytest.raises(TooManyFailures, match=r"at most 10.0% of .*, got 4 of 27.*a bug of the environment"):
        player.play(None, [Request(n, task) for n, task in enumerate(TASKS)], Sampling(), policy_version=0)
    assert not any(player.engine.ids), "slots are freed"
    player.close()
    monkeypatch.undo()
    source = make(3, player=make_player(tool=Failing(999), max_failed_share=0.0))
    with pytest.raises(TooManyFailures, match="ConnectionError: refused"):
        source.take(None, 0)


@jax.jit
def full_log_probs(params, tokens):
    positions = np.arange(240)[None]
    hidden = forward(CONFIG, params, tokens, positions, np.ones((1, 240), np.int32))
    return processed_log_probs(unembed(CONFIG, params, hidden), temperature=1.0, top_p=1.0)[0]


def gap_across_a_swap(forgets):
    """Largest difference between recorded log-probabilities and those of the full forward of each token's weights."""
    limits = Limits(max_turns=3, max_tokens_per_turn=12, max_tokens_per_episode=240)
    engine = make_engine(slots=3)
    player = Player(engine, tiny_env(DIALECT, limits), DIALECT, timeout_seconds=600, max_retries=0)
    waiting = [Request(100 + n, task) for n, task in enumerate(TASKS[:4])]
    flight = Flight(player, Sampling(), draw=lambda n: [waiting.pop() for _ in waiting[:n]], waits_for_tools=True)
    finished = [*flight.tick(PARAMS, 0), *flight.tick(PARAMS, 0)]
    if forgets:
        engine.forget()
    while len(finished) < 4:
        finished += flight.tick(OTHER, 1)
    player.close()
    assert any({0, 1} <= set(t.policy_version[t.is_action].tolist()) for t in finished), "swapped in flight"
    gaps = []
    for t in finished:
        row = np.zeros((1, 240), np.int32)
        row[0, : len(t.token_ids)] = t.token_ids
        by_version = [np.asarray(full_log_probs(params, row)) for params in (PARAMS, OTHER)]
        for at in np.flatnonzero(t.is_action):
            want = by_version[t.policy_version[at]][at - 1, t.token_ids[at]]
            gaps.append(abs(t.behavior_logprob[at] - want))
    return max(gaps)


def test_after_a_swap_no_token_is_sampled_from_old_keys_and_values():  # fault 22
    assert gap_across_a_swap(forgets=True) < 1e-4
    assert gap_across_a_swap(forgets=False) > 1e-2, "the test sees what it is there to see"


def test_memory_is_flat_over_thousands_of_rollouts(tmp_path):  # fault 36
    limits = Limits(max_turns=1, max_tokens_per_turn=4, max_tokens_per_episode=240)
    player = Player(make_engine(slots=16), tiny_env(DIALECT, limits), DIALECT, timeout_seconds=600, max_retries=0)
    plan, stream = Plan(10, 10, 21), TaskStream(TASKS, 10, seed=0)
    source = AsynchronousSource(
        player, stream, {}, Sampling(), plan, max_steps_off_policy=1, folder=tmp_path
    )  # fmt: skip

    def alive():
        gc.collect()
        kinds = defaultdict(int)
        for each in gc.get_objects():
            kinds[type(each).__name__] += 1
        return len(jax.live_arrays()), kinds["Trajectory"], kinds["_Rollout"], kinds["_Group"], kinds["Future"]

    counts = []
    for version in range(21):
        source.take(PARAMS, version)
        if version in (3, 20):
            with source.paused():
                counts.append(alive())
    source.close()
    player.close()
    assert player.sampled_tokens > 2100
    (arrays, *early), (arrays_later, *late) = counts
    assert arrays_later <= arrays
    assert sum(late) <= sum(early) + 2 * 10 * 10, "no more than what is in flight and in the queue"
