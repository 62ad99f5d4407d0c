"""launch/study.py: finished runs side by side."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from searchrl_jax.evaluation.study import episodes_path, labels
from searchrl_jax.evaluation.summary import EpisodeRecord, summarise

LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "study.py"


def study(argv: list[str]) -> int:
    spec = importlib.util.spec_from_file_location("launch_study", LAUNCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    status: int = module.main(argv)
    return status


def records(ndcg: float, failed: int, action_tokens: int = 60) -> list[EpisodeRecord]:
    return [
        EpisodeRecord(
            task_id=f"t{i}",
            slice="bridge" if i % 2 else "known_item",
            status=None if not action_tokens else "turn_limit" if i < failed else "submitted",
            ndcg=0.0 if i < failed else ndcg,
            turns=3,
            action_tokens=action_tokens,
            seconds=0.1,
            calls=4,
            malformed_calls=1 if i == 0 and action_tokens else 0,
        )
        for i in range(10)
    ]


def finished(workdir: Path, tuned: float, **settings: Any) -> Path:
    """A run directory with what the tables read: the base fails on 4 of 10 tasks and else reaches 0.5."""
    (workdir / "evaluation").mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"exp": "x", "workdir": str(workdir)} | settings))
    agents = {"base": records(0.5, 4), "tuned": records(tuned, 0), "bm25": records(0.5, 0, action_tokens=0)}
    for name, temperature in (("final", 1.0), ("final_greedy", 0.0), ("final_t05", 0.5)):
        summary = summarise(agents, resamples=50) | {"temperature": temperature, "seconds": {"total": 1380.0}}
        (workdir / "evaluation" / f"{name}.json").write_text(json.dumps(summary))
        episodes = episodes_path(workdir / "evaluation", "tuned", temperature)
        episodes.parent.mkdir(exist_ok=True)
        episodes.write_text(json.dumps({"records": [asdict(record) for record in agents["tuned"]]}))
    return workdir


def test_each_run_and_temperature_has_a_row_in_each_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = finished(tmp_path / "a", 0.75, seed=0, rl={"loss_fn": "ppo"})
    other = finished(tmp_path / "b", 0.7, seed=0, rl={"loss_fn": "cispo"})
    assert study([str(one), str(other)]) == 0
    gains, margins, against = capsys.readouterr().out.strip().split("\n\n")
    cells = gains.splitlines()[2].split(" | ")
    assert cells[:4] == ["| rl.loss_fn=ppo", "1", "0.300", "0.750"] and cells[4].startswith("+0.450 [")
    assert cells[5:] == ["+0.250 [+0.250, +0.250]", "40.0 %", "0.0 %", "2.5 %", "23 |"]
    assert [row.split(" | ")[1] for row in gains.splitlines()[2:]] == ["1", "0.5", "0"] * 2
    assert margins.splitlines()[2] == "| BM25 |  | 0.500 | 0.500 | 0.500 |"
    assert margins.splitlines()[6].startswith("| rl.loss_fn=cispo | 1 | 0.700, +0.200 [+0.200, +0.200] |")
    assert against.splitlines()[2].split(" | ") == [
        "| rl.loss_fn=cispo",
        "1",
        *["-0.050 [-0.050, -0.050]"] * 2,
        "+0.0 [+0.0, +0.0]",
        "-0.050 [-0.050, -0.050]",
        "-0.050 [-0.050, -0.050] |",
    ]
    assert [row.split(" | ")[1] for row in against.splitlines()[2:]] == ["1", "0.5", "0"]
    assert all(len({row.count("|") for row in table.splitlines()}) == 1 for table in (gains, margins, against))


def test_runs_are_called_by_what_tells_them_apart() -> None:
    assert labels([{"seed": 0, "workdir": "a"}, {"seed": 1, "workdir": "b"}]) == ["seed=0", "seed=1"]
    assert labels([{"seed": 0, "rl.gamma": 1.0}, {"seed": 1}]) == ["seed=0, rl.gamma=1.0", "seed=1, rl.gamma=None"]
    three = [{"seed": 0, "rl.loss_fn": "ppo"}, {"seed": 0, "rl.loss_fn": "cispo"}, {"seed": 1, "rl.loss_fn": "ppo"}]
    assert labels(three) == ["seed=0, rl.loss_fn=ppo", "rl.loss_fn=cispo", "seed=1"]
    assert labels([{"seed": 0}]) == ["run"]


def test_summaries_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study([str(finished(tmp_path / "a", 0.75, seed=0)), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["run"] and list(printed["run"]) == ["final", "final_t05", "final_greedy"]


def test_a_run_that_is_not_finished_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("launch/study.py: error: ") and str(tmp_path) in error


def test_runs_of_other_slices_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = finished(tmp_path / "a", 0.75, seed=0), finished(tmp_path / "b", 0.75, seed=1)
    for path in (other / "evaluation").glob("*.json"):
        path.write_text(path.read_text().replace("known_item", "own"))
    assert study([str(one), str(other)]) == 2
    assert "seed=1: expected the slices ['known_item', 'bridge']" in capsys.readouterr().err


def test_runs_of_other_tasks_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = finished(tmp_path / "a", 0.75, seed=0), finished(tmp_path / "b", 0.75, seed=1)
    path = episodes_path(other / "evaluation", "tuned", 0.5)
    path.write_text(path.read_text().replace('"t3"', '"another"'))
    assert study([str(one), str(other)]) == 2
    assert "seed=1: expected the tasks of the first run" in capsys.readouterr().err
    path.write_text("{}")
    assert study([str(one), str(other)]) == 2
    assert str(path) in capsys.readouterr().err
