"""Killed at random moments: nothing lost, nothing doubled.

`pytest -m slow tests/train/test_kills.py --kills=20` kills more often.
"""

import json
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import arrays, begin, finish, lines, rows

pytestmark = pytest.mark.slow

BOUND = 2
CHANGES = {
    "schedule.max_epochs": 100,
    "schedule.val_every": 4,
    "val.temperatures": (1.0,),
    "val.val_at_start": False,
    "evaluation.temperatures": (1.0,),
    "evaluation.tasks": 1,
    "rl.minibatches": 1,
}


def kill_at_random(argv: list[str], cache: Path, metrics: Path, rng: random.Random) -> bool:
    """Whether the run was killed: up to half a second after one or two further steps, unless it ended before."""
    process, until = begin(argv, cache), lines(metrics) + rng.choice((1, 2))
    deadline = time.monotonic() + 240
    while lines(metrics) < until and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5 * rng.random())
    process.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), printed
    return process.returncode != 0


def trained(workdir: Path, group_size: int) -> list[tuple[int, str]]:
    """Number and task of each trained group, in the order of training; a group is whole."""
    found = []
    for path in sorted((workdir / "trajectories").glob("step_*.jsonl")):
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        for start in range(0, len(episodes), group_size):
            group = episodes[start : start + group_size]
            first = group[0]["uid"]
            assert [each["uid"] for each in group] == list(range(first, first + group_size))
            assert first % group_size == 0 and len({each["task_id"] for each in group}) == 1
            found.append((first // group_size, group[0]["task_id"]))
    return found


def test_runs_killed_at_random(
    settings: dict[str, Any],
    options: Callable[[Mapping[str, Any]], list[str]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    kills = request.config.getoption("--kills", default=2)
    steps, cache, rng = 4 + 2 * kills, tmp_path / "cache", random.Random(0)
    settings |= CHANGES | {"schedule.max_steps": steps}
    whole, turns, ahead = tmp_path / "whole", tmp_path / "turns", tmp_path / "ahead"
    finish(begin(options(settings | {"workdir": str(whole)}), cache))
    for workdir, bound in ((turns, 0), (ahead, BOUND)):
        argv = options(settings | {"workdir": str(workdir), "rollout.max_steps_off_policy": bound})
        killed = sum(kill_at_random(argv, cache, workdir / "metrics.jsonl", rng) for _ in range(kills))
        assert killed >= kills / 2
        finish(begin(argv, cache))
        assert [row["step"] for row in rows(workdir / "metrics.jsonl")] == list(range(1, steps + 1))

    # In turns: bit for bit the run that nobody killed.
    expected, found = arrays(whole, "rl"), arrays(turns, "rl")
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)
    assert rows(turns / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    assert any((row["grad_norm"] or 0) > 0 for row in rows(whole / "metrics.jsonl")), "something was learnt"

    assert rows(whole / "metrics.jsonl")[-1]["training/epoch"] > 1, "the runs go on past an epoch's end"  # fault 31

    # Ahead: the same tasks under the same numbers, each trained once, none too old.
    in_order, size = trained(whole, settings["batch.group_size"]), settings["batch.global_batch_size"]
    assert [number for number, _ in in_order] == list(range(steps * size))
    assert sorted(trained(ahead, settings["batch.group_size"])) == in_order
    assert max(row["staleness/max"] for row in rows(ahead / "metrics.jsonl")) <= BOUND
