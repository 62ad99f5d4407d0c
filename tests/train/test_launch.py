"""launch/tpu.py: what is called wrongly ends with 2 and one line that says why."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from searchrl_jax.train import loop
from searchrl_jax.train.interrupt import Interrupted

LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "tpu.py"
Launch = Callable[[list[str]], int]
Options = Callable[[Mapping[str, Any]], list[str]]


def status(launch: Launch, argv: list[str]) -> int:
    """What the process would exit with."""
    try:
        return launch(argv)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--exp=mtrl_search", "--scale=local", "--rl.loss=cispo"], "rl.loss_fn"),
        (["--exp=mtrl_search", "--scale=local", "--rl.loss_fn=cispoo"], "cispo"),
        (["--exp=mtrl_search", "--scale=local", "--optimizer.learning_rate=fast"], "expected a number"),
        (["--exp=mtrl_search", "--scale=local", "--optimizer.learning_rate=-1"], "optimizer.learning_rate"),
        (["--exp=mtrl_search", "--scale=huge"], "scale: expected auto or one of"),
        (["--exp=mtrl_serch"], "did you mean mtrl_search"),
        ([], "--exp: expected the name of an experiment"),
        (["--exp=mtrl_search", "--scale=local", "--data.corpus=docs.jsonl"], "data.tasks: expected a JSONL file"),
    ],
)
def test_wrong_calls_end_with_2_and_one_line(
    launch: Launch, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(launch, argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("launch/tpu.py: error: ") and message in error


def test_help_ends_with_0(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(launch, ["--help"]) == 0
    assert status(launch, ["--exp=mtrl_search", "--scale=local", "--help"]) == 0
    assert "clip_low_threshold" in capsys.readouterr().out.replace("-", "_")


def test_bad_row_of_ones_own_data_ends_the_process_with_2(
    settings: dict[str, Any], options: Options, tmp_path: Path
) -> None:
    tasks = Path(settings["data.tasks"])
    rows = tasks.read_text().splitlines()
    rows[2] = json.dumps(json.loads(rows[2]) | {"relevance": {"tiny.nobody": 1}})
    tasks.write_text("\n".join(rows) + "\n")
    argv = options(settings | {"workdir": str(tmp_path / "run")})
    ended = subprocess.run(
        [sys.executable, str(LAUNCH), *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(LAUNCH.parents[1])},
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    for part in ("launch/tpu.py: error: ", f"{tasks}, line 3", "'relevance'", "tiny.nobody"):
        assert part in ended.stderr


def test_interrupted_run_ends_with_0_and_says_how_to_go_on(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(experiment: object) -> None:
        raise Interrupted("stopped by Ctrl-C; the same command goes on from here")

    monkeypatch.setattr(loop, "run", stopped)
    assert launch(["--exp=mtrl_search", "--scale=local"]) == 0
    assert "the same command goes on from here" in capsys.readouterr().out


def test_json_flag_prints_the_summary_as_the_last_line(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "run", lambda experiment: {"agents": {"base": experiment.seed}})
    assert launch(["--exp=mtrl_search", "--scale=local", "--seed=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"agents": {"base": 3}}
    assert launch(["--exp=mtrl_search", "--scale=local"]) == 0
    assert capsys.readouterr().out == ""
