"""Killed at any moment and started again, a run ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from searchrl_jax.train.tracker import read_rows

CLOCKS = ("timing_s/", "timing_share/", "throughput/", "memory/")
LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "tpu.py"
CHANGES = {
    "schedule.max_steps": 3,
    "schedule.val_every": 3,
    "val.temperatures": (1.0,),
    "evaluation.temperatures": (1.0,),
    "rl.minibatches": 1,
    # All that the order of prompts may depend on.
    "rl.refill_groups": 1,
    "data.mixing": ("known_item=2", "bridge=1"),
    "data.mixing_field": "slice",
    "data.curriculum": True,
}


def begin(argv: list[str], cache: Path) -> subprocess.Popen[str]:
    # Compiled once for all processes of the test, and quickly: compiling is nearly all that so small a run does.
    environment = os.environ | {
        "PYTHONPATH": str(LAUNCH.parents[1]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, str(LAUNCH), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed, after it ended by itself with status 0."""
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    return printed


def send(process: subprocess.Popen[str], number: int, when: Callable[[], bool]) -> None:
    """Sends a signal as soon as `when` holds."""
    deadline = time.monotonic() + 240
    while not when():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"ended before the signal: {process.communicate()[0]}")
        time.sleep(0.01)
    process.send_signal(number)


def kill(process: subprocess.Popen[str], when: Callable[[], bool]) -> None:
    send(process, signal.SIGKILL, when)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def arrays(workdir: Path, phase: str) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint: parameters, optimizer state, counters."""
    with ocp.CheckpointManager((workdir / "checkpoints" / phase).absolute()) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no sharding was given
        step = manager.latest_step()
        restored = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))["arrays"]
    return {name: np.asarray(array) for name, array in restored.items()}


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file without what a clock says."""
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCKS) and k not in ("tokens_per_second", "seconds")}
        for row in read_rows(path)
    ]


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key != "seconds"}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def test_killed_again_and_again_a_run_ends_bit_for_bit_the_same(
    settings: dict[str, Any],
    options: Callable[[Mapping[str, Any]], list[str]],
    launch: Callable[[list[str]], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, broken, cache = tmp_path / "whole", tmp_path / "broken", tmp_path / "cache"
    finish(begin(options(settings | CHANGES | {"workdir": str(whole)}), cache))
    argv = options(settings | CHANGES | {"workdir": str(broken)})
    warmup, metrics = broken / "warmup.jsonl", broken / "metrics.jsonl"

    # Ctrl-C during the warm-up: everything is saved, exit status 0. Meanwhile nobody else may work there.
    process = begin(argv, cache)
    send(process, 0, lambda: (broken / "config.json").exists())
    assert launch(argv) == 2
    assert "another process is running in it" in capsys.readouterr().err
    send(process, signal.SIGINT, lambda: lines(warmup) >= 5)
    printed = finish(process)
    assert "Ctrl-C" in printed and "the same command goes on from here" in printed
    saved = lines(warmup)
    assert saved >= 5

    # Another configuration is refused, by name.
    assert launch([*argv, "--optimizer.adam_beta1=0.8"]) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1 and "optimizer.adam_beta1 is 0.9 there and 0.8 here" in refused

    # Killed later in the warm-up; in reinforcement learning, past a checkpoint; during the evaluation.
    kill(begin(argv, cache), lambda: lines(warmup) >= saved + 5)
    kill(begin(argv, cache), lambda: (broken / "checkpoints" / "rl" / "1").exists() and lines(metrics) >= 2)
    kill(begin(argv, cache), lambda: (broken / "evaluation" / "episodes" / "base_t1.json").exists())
    printed = finish(begin(argv, cache))
    assert "report: " in printed

    for phase in ("warmup", "rl"):
        expected, found = arrays(whole, phase), arrays(broken, phase)
        assert expected.keys() == found.keys() and len(found) > 10
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)
    before, after = arrays(broken, "warmup"), arrays(broken, "rl")
    assert any(not np.array_equal(before[name], after[name]) for name in before if "params" in name)

    assert rows(metrics) == rows(whole / "metrics.jsonl")
    assert [row["step"] for row in rows(metrics)] == [0, 1, 2, 3]
    assert rows(warmup) == rows(whole / "warmup.jsonl")
    for name in ("evaluation/episodes/base_t1.json", "evaluation/episodes/tuned_t1.json", "evaluation/final.json"):
        expected, found = (json.loads((workdir / name).read_text()) for workdir in (whole, broken))
        if name.endswith("final.json"):
            expected, found = expected["agents"]["tuned"]["ndcg@10"], found["agents"]["tuned"]["ndcg@10"]
        assert without_seconds(found) == without_seconds(expected)
    for path in sorted((whole / "trajectories").iterdir()):
        expected, found = (
            [
                without_seconds(json.loads(line))
                for line in (workdir / "trajectories" / path.name).read_text().splitlines()
            ]
            for workdir in (whole, broken)
        )
        assert found == expected
