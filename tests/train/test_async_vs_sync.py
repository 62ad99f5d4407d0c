"""benchmarks/async_vs_sync.py: the two ways side by side."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "async_vs_sync.py"


@pytest.mark.slow
def test_both_ways_begin_with_one_base_agent(
    settings: dict[str, Any],
    options: Callable[[Mapping[str, Any]], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("async_vs_sync", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings |= {
        "schedule.max_steps": 2,
        "val.val_at_start": False,
        "evaluation.temperatures": (1.0,),
        "evaluation.tasks": 2,
    }
    own = ["--tool-latency=0.01", "--steps-off-policy=1", "--seeds=3,4", f"--workdir={tmp_path / 'both'}"]
    argv = [*own, *options(settings)]
    assert module.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.count("of behaviour cloning") == 2  # one base for both runs of a seed
    _, steps, _, finals, *gaps = printed[printed.index("tools take") :].strip().split("\n\n")
    assert [row.split(" | ")[0] for row in steps.splitlines()[2:]] == ["| 1", "| 2"]
    assert [row.split(" | ")[:2] for row in finals.splitlines()[2:]] == [
        [f"| {seed}", mode] for seed in (3, 4) for mode in ("in turns", "asynchronous")
    ]
    assert [gap.splitlines()[2].split(" | ")[0] for gap in gaps] == ["| seed 3, asynchronous", "| seed 4, asynchronous"]
    assert (tmp_path / "both" / "curves.png").exists()
    assert module.main(argv) == 0
    assert "of behaviour cloning" not in capsys.readouterr().out
    assert module.main([*argv, "--rl.entropy_coef=0.5"]) == 2
    assert "rl.entropy_coef" in capsys.readouterr().err
