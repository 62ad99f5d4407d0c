"""The whole job with rollouts that run ahead of the learner."""

import json
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.rollout.asynchronous import AsynchronousSource
from searchrl_jax.rollout.engine import Engine
from searchrl_jax.train import loop
from searchrl_jax.train.loop import SetupError, run
from searchrl_jax.train.tracker import read_rows

CHANGES = {
    "schedule.max_steps": 4,
    "val.temperatures": (1.0,),
    "val.val_at_start": False,
    "evaluation.temperatures": (1.0,),
    "evaluation.tasks": 1,
    "rl.minibatches": 1,
}


def experiment(settings: dict[str, Any], workdir: Path, **changes: Any) -> Experiment:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(workdir)), settings | CHANGES | changes)


def episodes(workdir: Path) -> list[dict[str, Any]]:
    """All trained episodes in order, without what a clock says."""
    found = []
    for path in sorted((workdir / "trajectories").iterdir()):
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            for part in (episode, *episode["turns"]):
                del part["seconds"]
            found.append(episode)
    return found


@pytest.mark.slow
def test_rollouts_ahead_of_the_learner(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = tmp_path / "ahead"
    run(experiment(settings, ahead, rollout__max_steps_off_policy=2))
    rows = read_rows(ahead / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert sum(row[f"staleness/{age}"] for age in range(3)) == pytest.approx(1) and row["staleness/max"] <= 2
        assert {"dropped_groups", "retries", "masked_rollouts", "throughput/rollout", "throughput/update"} <= row.keys()
        assert {"timing_s/queue_wait", "timing_share/tools", "timing_s/rollout"} <= row.keys()
    assert sorted(episode["uid"] for episode in episodes(ahead)) == list(range(4 * 8))
    assert [path.name for path in sorted((ahead / "checkpoints" / "rollouts").iterdir())] == [
        "step_000003.npz",
        "step_000004.npz",
    ]

    # Bound 0: in turns and by the thread's machinery, bit for bit the same.
    turns, forced = tmp_path / "turns", tmp_path / "forced"
    run(experiment(settings, turns))

    def make(job: Any, steps: int, frozen: Any, device: Any) -> AsynchronousSource:
        batch = job.experiment.batch
        return AsynchronousSource(
            job.player,
            job.stream,
            {},
            loop.Sampling(1.0, 1.0),
            loop.Plan(batch.global_batch_size, batch.group_size, steps),
            max_steps_off_policy=0,
            folder=job.workdir / "checkpoints" / "rollouts",
            device=device,
        )

    monkeypatch.setattr(loop._Run, "_make_source", make)
    run(experiment(settings, forced))
    assert episodes(forced) == episodes(turns)
    clocks = ("timing_", "throughput/", "tokens_per_second", "seconds")
    one, two = (
        [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in read_rows(workdir / "metrics.jsonl")]
        for workdir in (turns, forced)
    )
    assert one == two
    assert any((row["grad_norm"] or 0) > 0 for row in one), "something was learnt"
    for row in (row for row in one if "learner/ratio_max" in row):  # the engine samples with what is trained: fault 23
        assert row["learner/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert row["learner/approx_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_an_exception_of_the_worker_ends_the_run(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, chunks = Engine.decode, []

    def fails(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rollouts":
            chunks.append(1)
        if len(chunks) == 20:
            raise MemoryError("the device is full")
        return decode(*args, **options)

    monkeypatch.setattr(Engine, "decode", fails)
    with pytest.raises(MemoryError, match="the device is full"):
        run(experiment(settings, tmp_path / "ahead", rollout__max_steps_off_policy=2, schedule__max_steps=50))
    assert len(chunks) == 20


def test_several_processes_play_in_turns(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SetupError, match="max_steps_off_policy: expected 0 with 2 processes, got 3"):
        run(experiment(settings, tmp_path / "run", rollout__max_steps_off_policy=3))
