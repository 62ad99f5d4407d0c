import json

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
    "change", [{"epoch": -1}, {"epoch": 1.0}, {"batch": 5}, {"batch": -1}, {"batch": True}, {"more": 0}]
)
def test_damaged_state_is_refused(change):
    stream = TaskStream(make_tasks(8), 2, seed=0)
    with pytest.raises(ValueError, match=r"epoch must|batch must|has the fields"):
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
