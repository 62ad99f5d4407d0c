import json
from collections import Counter

import numpy as np
import pytest

from searchrl_jax.data.schema import Task
from searchrl_jax.data.stream import TaskStream


def make_tasks(count, prefix="q"):
    return [Task(f"{prefix}{index}", "query", {"d": 1}) for index in range(count)]


def ids(batch):
    return [task.task_id for task in batch]


def take(stream, count):
    return [ids(stream.next_batch()) for _ in range(count)]


def test_an_epoch_repeats_no_task_and_drops_the_remainder():
    stream = TaskStream(make_tasks(11), batch_size=3, seed=0)
    assert stream.batches_per_epoch == 3
    for _ in range(4):
        epoch = sum(take(stream, 3), [])
        assert len(epoch) == len(set(epoch)) == 9


def test_no_task_is_dropped_for_good():
    stream = TaskStream(make_tasks(11), batch_size=3, seed=0)
    assert {name for batch in take(stream, 30) for name in batch} == set(ids(make_tasks(11)))


def test_order_changes_with_seed_and_epoch_but_not_with_the_order_of_the_list():
    tasks = make_tasks(40)
    first = take(TaskStream(tasks, 4, seed=1), 20)
    assert take(TaskStream(tasks[::-1], 4, seed=1), 20) == first
    assert take(TaskStream(tasks, 4, seed=2), 20) != first
    assert first[:10] != first[10:]


def test_resumed_at_any_point_it_goes_on_as_if_never_stopped():
    # 3 batches an epoch, so that 3, 6 and 9 are boundaries: there other systems trained nothing, or began again.
    tasks = make_tasks(11)
    whole = take(TaskStream(tasks, 3, seed=5), 14)
    for stop in range(11):
        stream = TaskStream(tasks, 3, seed=5)
        assert take(stream, stop) == whole[:stop]
        saved = json.dumps(stream.state())
        resumed = TaskStream(make_tasks(11)[::-1], 3, seed=5)
        resumed.next_batch()
        resumed.restore(json.loads(saved))
        assert resumed.state() == json.loads(saved)
        assert take(resumed, 14 - stop) == whole[stop:]


def test_reading_the_state_changes_nothing():
    tasks = make_tasks(7)
    watched, plain = TaskStream(tasks, 2, seed=0), TaskStream(tasks, 2, seed=0)
    for _ in range(10):
        watched.state()
        assert ids(watched.next_batch()) == ids(plain.next_batch())


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (TaskStream(make_tasks(8, "other"), 2, seed=0), "of other tasks"),
        (TaskStream(make_tasks(9), 2, seed=0), "of other tasks"),
        (TaskStream(make_tasks(8), 2, seed=1), "of another seed: seed is 1 there and 0 here"),
        (TaskStream(make_tasks(8), 4, seed=0), "of another batch size"),
    ],
)
def test_state_of_another_stream_is_refused(other, names):
    stream = TaskStream(make_tasks(8), 2, seed=0)
    before = stream.state()
    with pytest.raises(ValueError, match=names):
        stream.restore(other.state())
    assert stream.state() == before


@pytest.mark.parametrize(
    "change",
    [
        {"pools": {"": [-1, 0, 0]}},
        {"pools": {"": [1.0, 0, 0]}},
        {"pools": {"": [0, 9, 0]}},
        {"pools": {"": [0, True, 0]}},
        {"pools": {"": [0, 0]}},
        {"pools": {"x": [0, 0, 0]}},
        {"draws": -1},
        {"rates": {"q0": 2.0}},
        {"rates": {"x": 0.5}},
        {"more": 0},
    ],
)
def test_damaged_state_is_refused(change):
    stream = TaskStream(make_tasks(8), 2, seed=0)
    with pytest.raises(ValueError, match=r"the state is damaged|has the fields"):
        stream.restore({**stream.state(), **change})


@pytest.mark.parametrize(
    ("tasks", "batch_size", "seed", "names"),
    [
        (make_tasks(3), 0, 0, "batch_size must be at least 1"),
        (make_tasks(3), 4, 0, "3 tasks don't fill one batch of 4"),
        (make_tasks(3), 1, -1, "seed must be at least 0"),
        (make_tasks(3) + make_tasks(1), 1, 0, "'q0' occurs twice"),
    ],
)
def test_stream_refuses(tasks, batch_size, seed, names):
    with pytest.raises(ValueError, match=names):
        TaskStream(tasks, batch_size, seed)


def test_the_order_is_the_documented_shuffle_of_each_epoch():
    tasks, names = make_tasks(11), sorted(ids(make_tasks(11)))
    stream = TaskStream(tasks, 3, seed=5)
    for epoch in range(3):
        order = [names[i] for i in np.random.default_rng((5, epoch)).permutation(11)]
        assert take(stream, 3) == [order[0:3], order[3:6], order[6:9]]


def test_more_tasks_are_fresh_and_come_from_the_same_order():
    tasks = make_tasks(11)
    stream, plain = TaskStream(tasks, 3, seed=5), TaskStream(tasks, 3, seed=5)
    order = sum(take(plain, 3), [])
    batch = stream.next_batch()
    assert ids(batch) + ids(stream.more(2, taken=batch)) + take(stream, 1)[0] == order[:8]
    assert stream.more(0) == []
    # The epoch ends within a batch: what the batch has had does not come again.
    for _ in range(20):
        batch = stream.next_batch()
        batch += stream.more(4, taken=batch)
        batch += stream.more(9, taken=batch)
        assert len(batch) == len(set(ids(batch))) == 11, "all there are, and then no more"


def make_datasets(**sizes):
    return [
        Task(f"{name}{i}", "query", {"d": 1}, metadata={"dataset": name}) for name, n in sizes.items() for i in range(n)
    ]


def test_datasets_are_mixed_by_weight_and_each_has_epochs_of_its_own():
    tasks = make_datasets(a=40, b=6, c=6)
    stream = TaskStream(tasks, 5, seed=0, weights={"a": 2, "b": 1, "c": 1})
    given, seen = Counter(), []
    for number in range(1, 41):
        batch = ids(stream.next_batch())
        assert len(set(batch)) == 5
        seen += batch
        given.update(name[0] for name in batch)
        for dataset, share in (("a", 0.5), ("b", 0.25), ("c", 0.25)):
            assert abs(given[dataset] - share * 5 * number) < 2
    of_a = [name for name in seen if name[0] == "a"]
    assert len(set(of_a[:36])) == 36, "no task of a dataset comes twice in its epoch"
    assert {name for name in seen if name[0] == "b"} == {f"b{i}" for i in range(6)}
    assert take(TaskStream(tasks[::-1], 5, seed=0, weights={"c": 10, "b": 10, "a": 20}), 8) == [
        seen[i : i + 5] for i in range(0, 40, 5)
    ]


def test_a_dataset_too_small_for_its_share_gives_all_it_has():
    stream = TaskStream(make_datasets(a=9, b=2), 6, seed=0, weights={"a": 1, "b": 9})
    for _ in range(5):
        batch = ids(stream.next_batch())
        assert len(set(batch)) == 6 and {"b0", "b1"} < set(batch)


def test_weight_zero_leaves_a_dataset_out():
    stream = TaskStream(make_datasets(a=8, b=50), 4, seed=0, weights={"a": 1, "b": 0})
    assert stream.batches_per_epoch == 2
    assert all(name[0] == "a" for batch in take(stream, 6) for name in batch)


@pytest.mark.parametrize(
    ("weights", "names"),
    [
        ({"a": 1}, "a weight for each dataset of the tasks, a, b, got weights for a;"),
        ({"a": 1, "b": 1, "c": 1}, "got weights for a, b, c"),
        ({"a": -1, "b": 2}, "weights of at least 0"),
        ({"a": 0, "b": 0}, "not all 0"),
        ({"a": 1, "b": float("nan")}, "weights of at least 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, names):
    with pytest.raises(ValueError, match=names):
        TaskStream(make_datasets(a=3, b=3), 2, seed=0, weights=weights)


def test_a_task_without_a_dataset_cannot_be_mixed():
    with pytest.raises(ValueError, match="'q0': expected the name of its dataset in the metadata field 'source'"):
        TaskStream(make_tasks(3), 2, seed=0, weights={"a": 1}, field="source")


def test_the_curriculum_prefers_tasks_that_are_passed_half_of_the_time():
    tasks = make_tasks(30)
    stream = TaskStream(tasks, 3, seed=0, curriculum=True)
    for _ in range(8):
        for i in range(30):
            stream.record(f"q{i}", (0.0, 1.0, 0.5)[i % 3])
    assert stream.pass_rate("q2") == 0.5 and stream.pass_rate("q1") == 1 - 2**-9
    counts = Counter(name for batch in take(stream, 600) for name in batch)
    by_kind = [sum(counts[f"q{i}"] for i in range(kind, 30, 3)) for kind in range(3)]
    # Weights 0.05, 0.05 and 1: nine in ten draws, less as the ten best can each be drawn once in a batch.
    assert by_kind[2] > 1550 and min(by_kind[:2]) > 60
    for batch in take(stream, 50):
        assert len(set(batch)) == 3


def test_the_first_draw_of_the_curriculum_is_in_proportion_to_the_weights():
    counts = Counter()
    for seed in range(3000):
        stream = TaskStream(make_tasks(3), 1, seed=seed, curriculum=True)
        for _ in range(2):
            stream.record("q0", 1.0)  # 1/2 -> 3/4 -> 7/8: weight 7/16 against 1 and 1
        counts.update(ids(stream.next_batch()))
    assert counts["q0"] / 3000 == pytest.approx(7 / 39, abs=0.025)


def test_pass_rates_change_nothing_without_a_curriculum():
    stream, plain = TaskStream(make_tasks(9), 3, seed=0), TaskStream(make_tasks(9), 3, seed=0)
    stream.record("q1", 1.0)
    assert stream.state() == plain.state() and take(stream, 9) == take(plain, 9)


@pytest.mark.parametrize(("name", "passed"), [("x", 0.5), ("q1", 1.5), ("q1", float("nan"))])
def test_a_pass_rate_that_is_none_is_refused(name, passed):
    with pytest.raises(ValueError, match="a share in"):
        TaskStream(make_tasks(9), 3, seed=0).record(name, passed)


def test_mixed_by_pass_rate_and_with_refills_it_resumes_at_any_point():  # fault 32
    tasks = make_datasets(a=9, b=5)

    def build():
        return TaskStream(tasks, 4, seed=3, weights={"a": 2, "b": 1}, curriculum=True)

    def go(stream, numbers):
        seen = []
        for number in numbers:
            batch = stream.next_batch()
            batch += stream.more(number % 3, taken=batch)
            for task in batch:
                stream.record(task.task_id, (number + len(task.task_id) + int(task.task_id[1:])) % 4 / 3)
            seen.append(ids(batch))
        return seen

    whole = go(build(), range(12))
    for stop in range(12):
        stream = build()
        go(stream, range(stop))
        resumed = build()
        resumed.restore(json.loads(json.dumps(stream.state())))
        assert go(resumed, range(stop, 12)) == whole[stop:]
