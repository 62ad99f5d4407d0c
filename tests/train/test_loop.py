"""The main job from somebody's own documents to the report, in seconds."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from searchrl_jax.config.overlays import to_json, with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.env.demonstrator import DemonstrationError
from searchrl_jax.env.rewards import STATUSES, SUBMITTED
from searchrl_jax.train import loop
from searchrl_jax.train.checkpoint import CheckpointMismatch
from searchrl_jax.train.loop import SetupError, run
from searchrl_jax.train.tracker import read_rows

METRICS = {"ndcg@10", "ndcg@10_completed", "failure_rate", "malformed_rate", "turns", "action_tokens", "seconds"}
SLICES = {"known_item", "bridge"}


def documented_names(experiment: Experiment) -> tuple[set[str], set[str]]:
    """The names that docs/metrics.md says a run of `experiment` writes, and those that some runs write beside them."""
    val, page = experiment.val, (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    fillings = {
        "{status}": [status for status in STATUSES if status != SUBMITTED],
        "{k}": [k for k in val.pass_k_values if k <= val.val_group_size],
        "{age}": list(range(experiment.rollout.max_steps_off_policy + 1)),
        "{val}": ["val", *(f"val_t{temperature:g}" for temperature in val.temperatures[1:])],
    }
    names: set[str] = set()
    others: set[str] = set()
    for section in page.split("\n## ")[1:]:
        written = {name for line in section.splitlines() if line.startswith("| `") for name in backticked(line)}
        if section.startswith("Summary"):
            written |= {"{val}/" + name for name in written}
        elif section.startswith("Distributions"):
            written = {prefix + name for prefix in ("rollout/", "{val}/") for name in written}
        for mark, values in fillings.items():
            written = {name.replace(mark, str(value)) for name in written for value in values}
        if section.startswith("Training rows, where"):
            others |= written
        else:
            names |= written
    return names, others


def backticked(line: str) -> list[str]:
    """The names in the first cell of a table's row."""
    return re.findall("`([^`]+)`", line.split("|")[1])


def snapshot(workdir: Path) -> dict[str, bytes]:
    """What a finished run must not touch again."""
    kept = ("checkpoints", "trajectories", "metrics.jsonl", "warmup.jsonl", "tokenizer.json", "config.json", "episodes")
    return {
        str(path.relative_to(workdir)): path.read_bytes()
        for path in sorted(workdir.rglob("*"))
        if path.is_file() and set(path.relative_to(workdir).parts) & set(kept)
    }


def test_whole_job(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = tmp_path / "runs" / "mine"
    experiment = with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(workdir)), settings)
    summary = run(experiment)
    printed = capsys.readouterr().out

    # What the terminal shows: a line a step, the validations, the table.
    for part in ("step 1/2  reward", "step 2/2  reward", "validation after step 0", "nDCG@10", "report: "):
        assert part in printed
    assert "WARNING" not in printed

    # The run directory.
    assert json.loads((workdir / "config.json").read_text()) == to_json(experiment)
    for name in ("tokenizer.json", "report.html", "figures/learning_curves.png", "figures/agents.png"):
        assert (workdir / name).stat().st_size > 0, name
    assert [path.name for path in sorted((workdir / "trajectories").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert {path.name for path in (workdir / "evaluation").glob("*.json")} == {
        "final.json",
        "final_t05.json",
        "final_greedy.json",
    }
    assert (workdir / "checkpoints" / "warmup").is_dir() and (workdir / "checkpoints" / "rl").is_dir()
    assert not list(workdir.rglob("*.partial")) and not list(workdir.rglob("*.tmp"))

    # One row a step, each with what it must tell.
    rows = read_rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert {"reward", "ndcg@10", "failure_rate", "malformed_rate", "turns", "tokens_per_second"} <= row.keys()
        assert {
            "entropy",
            "kl",
            "grad_norm",
            "timing_s/rollout",
            "timing_s/policy_update",
            "timing_s/step",
        } <= row.keys()
        assert row["training/num_trajectories"] == 8
        assert row["rescored_ndcg_gap"] < 1e-6 and row["rescored_inconsistent"] == 0
    for row in (rows[0], rows[2]):
        assert {"val/ndcg@10", "val_t0/ndcg@10", "val/rescored_ndcg_gap"} <= row.keys()
        assert {"val/reward/pass_at_1", "val/reward/pass_at_2", "val_t0/reward/pass_power_2"} <= row.keys()
        assert row["val/tokens/response_max"] <= 20 and row["val/reward/num_prompts"] == 4
    found = {name for row in rows for name in row} - {"kind", "step", "nonfinite"}
    documented, of_some = documented_names(experiment)
    assert not found - documented - of_some, "names that docs/metrics.md lacks"
    assert not documented - found, "names of docs/metrics.md that no row has"
    assert [row["step"] for row in read_rows(workdir / "warmup.jsonl")] == list(range(1, 71))
    losses = [row["loss"] for row in read_rows(workdir / "warmup.jsonl")]
    assert losses[-1] < losses[0] / 2

    # Trajectories that a person can read.
    lines = (workdir / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 8
    episode = json.loads(lines[0])
    assert {"task_id", "status", "reward", "ranking", "turns"} <= episode.keys()
    assert {"action", "observation"} <= episode["turns"][0].keys()

    # final.json has the keys that outside checks read.
    final = json.loads((workdir / "evaluation" / "final.json").read_text())
    assert final == json.loads(json.dumps(summary))
    assert final.keys() == {"agents", "differences", "temperature", "seconds"}
    assert final["agents"].keys() == {"base", "tuned", "bm25", "vector", "fusion"}
    for agent in final["agents"].values():
        assert agent["tasks"] == 4 and agent.keys() >= METRICS and agent["slices"].keys() == SLICES
        for part in agent["slices"].values():
            assert part.keys() >= METRICS | {"tasks"}
        assert sum(part["tasks"] for part in agent["slices"].values()) == 4
    assert final["differences"].keys() == {"tuned-base", "tuned-bm25", "tuned-vector", "tuned-fusion"}
    for difference in final["differences"].values():
        assert difference["ndcg@10"].keys() >= {"value", "low", "high", "p"}
    assert final["temperature"] == 1.0
    assert final["seconds"].keys() == {"setup", "warmup", "rl", "evaluation", "total"}
    parts = [seconds for phase, seconds in final["seconds"].items() if phase != "total"]
    assert final["seconds"]["total"] == pytest.approx(math.fsum(parts))
    assert min(parts) > 0
    assert json.loads((workdir / "evaluation" / "final_greedy.json").read_text())["temperature"] == 0
    report = (workdir / "report.html").read_text()
    assert "tiny." in report and "data:image/png" in report

    # A finished run only prints its result again.
    before = snapshot(workdir)
    again = run(experiment)
    printed = capsys.readouterr().out
    assert snapshot(workdir) == before
    for agent in ("base", "tuned"):
        assert again["agents"][agent] == summary["agents"][agent]
    assert again["differences"]["tuned-base"] == summary["differences"]["tuned-base"]
    assert "step 1/2" not in printed and "evaluating" not in printed
    assert "is finished" in printed and "report: " in printed

    # Another configuration is refused, and what may change is not.
    with pytest.raises(SetupError, match=r"another configuration: seed is 0 there and 1 here"):
        run(with_overrides(experiment, {"seed": 1}))
    assert snapshot(workdir) == before


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch.global_batch_size": 13}, "12 tasks don't fill one batch of 13"),
        ({"env.max_tokens_per_episode": 20}, "env.max_tokens_per_episode: expected more than"),
        ({"data.corpus": "missing.jsonl"}, "missing.jsonl does not exist"),
    ],
)
def test_what_cannot_begin_is_refused_before_any_work(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    experiment = Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / "run"))
    with pytest.raises(SetupError, match=message):
        run(with_overrides(experiment, settings | changes))
    # Nothing that was wrong is held against what is right.
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}


@pytest.mark.parametrize(
    "error", [CheckpointMismatch("expected another checkpoint"), DemonstrationError("raise env.max_turns")]
)
def test_what_the_user_can_mend_ends_a_run_with_its_message(
    error: ValueError, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(_: object) -> None:
        raise error

    monkeypatch.setattr(loop._Run, "finish", finish)
    experiment = with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / "run")), settings)
    with pytest.raises(SetupError, match=str(error)):
        run(experiment)
    # Nothing was trained, so nothing that was wrong is held against what is right. A checkpoint is.
    assert not (tmp_path / "run" / "config.json").exists()
    (tmp_path / "run" / "checkpoints" / "warmup" / "200").mkdir(parents=True)
    with pytest.raises(SetupError, match=str(error)):
        run(experiment)
    assert (tmp_path / "run" / "config.json").exists()


def test_a_split_without_tasks_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    path = Path(settings["data.tasks"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["split"] != "validation"))
    with pytest.raises(SetupError, match="got none for validation"):
        run(with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / "run")), settings))


def test_disagreement_of_the_second_reading_is_loud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = object.__new__(loop._Run)
    job.titles, job.experiment = {}, Experiment(exp="mine", scale="tiny")
    found = {"rescored_ndcg_gap": 0.25, "rescored_inconsistent": 0.125}
    monkeypatch.setattr(loop, "rescored_metrics", lambda *_: found)
    assert job._rescored([], [], "step 3") == found
    assert "WARNING: step 3: read strictly, the text of 12.5% of the episodes" in capsys.readouterr().out
    monkeypatch.setattr(loop, "rescored_metrics", lambda *_: dict.fromkeys(found, 0.0))
    job._rescored([], [], "step 4")
    assert capsys.readouterr().out == ""
