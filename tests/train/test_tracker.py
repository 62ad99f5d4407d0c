"""The metrics file over kills and resumes, and the wandb mirror's calls."""

import json
import math
import os
import signal
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.train.tracker import MetricsLog, WandbMirror, read_rows


def strict(path):
    """Rows as a strict JSON reader sees them."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_are_written_in_order_and_on_disk_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"reward": 0.5, "status": "ok", "done": True, "count": 3})
    assert strict(path) == [{"kind": "train", "step": 1, "reward": 0.5, "status": "ok", "done": True, "count": 3}]
    log.append(1, {"ndcg@10": 0.25}, kind="validation")
    log.append(2, {"reward": 0.75})
    log.close()
    assert [(row["kind"], row["step"]) for row in read_rows(path)] == [("train", 1), ("validation", 1), ("train", 2)]


def test_scalar_arrays_are_numbers(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(
        1, {"a": np.float32(0.5), "b": jnp.int32(2), "c": jnp.bfloat16(0.25), "d": np.bool_(True), "e": np.ones((1, 1))}
    )
    log.close()
    (row,) = strict(tmp_path / "metrics.jsonl")
    assert row == {"kind": "train", "step": 1, "a": 0.5, "b": 2, "c": 0.25, "d": True, "e": 1.0}
    assert isinstance(row["b"], int) and row["d"] is True


@pytest.mark.parametrize("value", [np.ones(2), None, [1, 2], {"a": 1}, np.datetime64(0, "s")])
def test_what_is_no_scalar_is_refused_and_nothing_written(tmp_path, value):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="bad: expected a number, a boolean or a string"):
        log.append(1, {"good": 1, "bad": value})
    log.append(1, {"good": 1})
    log.close()
    assert len(strict(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("name", ["kind", "step", "nonfinite"])
def test_reserved_names_are_refused(tmp_path, name):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=f"{name}: expected another name"):
        log.append(1, {name: 1})
    log.close()


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"loss": math.nan, "norm": jnp.float32(math.inf), "reward": 1.0})
    assert log.nonfinite == 2
    log.close()
    assert strict(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": None, "norm": None, "reward": 1.0, "nonfinite": ["loss", "norm"]}
    ]


def test_crash_at_5_last_save_3_resume_gives_one_row_each(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.append(step, {"run": 1})
        if step % 2 == 1:
            log.append(step, {"run": 1}, kind="validation")
    log.close()
    log = MetricsLog(path, resume_step=3)
    assert log.has(3) and log.has(3, "validation") and not log.has(4) and not log.has(5, "validation")
    for step in range(4, 8):
        log.append(step, {"run": 2})
    log.close()
    rows = [row for row in strict(path) if row["kind"] == "train"]
    assert [(row["step"], row["run"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]
    assert [row["step"] for row in strict(path) if row["kind"] == "validation"] == [1, 3]


def test_resuming_before_the_first_row_starts_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"a": 1})
    log.close()
    MetricsLog(path, resume_step=0).close()
    assert path.read_text() == ""


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"a": 1})
    log.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="expected no rows at the start of a run, got 1; resume from a checkpoint"):
        MetricsLog(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train", "step": 3, "a": 1}', "\x00\x00"])
def test_a_line_torn_by_a_kill_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    whole = '{"kind": "train", "step": 1, "a": 1}\n{"kind": "train", "step": 2, "a": 1}\n'
    path.write_text(whole + torn)
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    log = MetricsLog(path, resume_step=3)
    assert path.read_text() == whole
    log.append(3, {"a": 2})
    log.close()
    assert [row["step"] for row in strict(path)] == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for broken in ("{", "[]", '{"kind": "train"}', '{"step": 1}'):
        path.write_text('{"kind": "train", "step": 1}\n' + broken + '\n{"kind": "train", "step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl:2: expected a row with step and kind"):
            MetricsLog(path, resume_step=3)


def test_the_same_row_twice_is_refused(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"a": 1})
    with pytest.raises(ValueError, match="expected one train row of step 1, got a second"):
        log.append(1, {"a": 2})
    log.close()


def test_rows_survive_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, signal, sys; from searchrl_jax.train.tracker import MetricsLog; log = MetricsLog(sys.argv[1])\n"
        "for step in (1, 2, 3): log.append(step, {'a': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(path)], env=dict(os.environ), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in strict(path)] == [1, 2, 3]


class FakeWandb(types.ModuleType):
    """Records the calls that reach wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.finished = [], [], 0

    def Settings(self, **settings):  # noqa: N802  # wandb's own name
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def define_metric(self, *arguments, **options):
        pass

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


def test_wandb_mirror_keeps_its_run_id_over_a_resume(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume_step, mode in ((None, "online"), (1, "offline")):
        mirror = WandbMirror(tmp_path, mode=mode, project="p", name="n", config={"seed": 0})
        log = MetricsLog(tmp_path / "metrics.jsonl", resume_step=resume_step, mirror=mirror)
        for step in (1, 2):
            if not log.has(step):
                log.append(step, {"reward": float("nan") if step == 2 else 1.0})
        log.close()
    first, second = wandb.inits
    assert first["id"] == second["id"] and len(first["id"]) == 12
    assert (first["resume"], first["mode"], second["resume"], second["mode"]) == ("allow", "online", None, "offline")
    assert wandb.finished == 2
    nan_row = {"step": 2, "train/reward": None, "train/nonfinite": ["reward"]}
    assert wandb.rows == [{"step": 1, "train/reward": 1.0}, nan_row, nan_row]
    assert [row["step"] for row in strict(tmp_path / "metrics.jsonl")] == [1, 2]


def test_wandb_is_not_imported_unless_asked_for(tmp_path):
    program = (
        "import sys; from searchrl_jax.train.tracker import MetricsLog\n"
        "MetricsLog(sys.argv[1]).append(1, {'a': 1}); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "metrics.jsonl")], check=True, timeout=60)
