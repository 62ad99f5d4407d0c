"""A run that begins with the base agent of another."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.models.decoder import Params
from searchrl_jax.train import loop
from searchrl_jax.train.loop import SetupError, run

WITHOUT_LEARNING = {"schedule.max_steps": 0, "schedule.val_every": 0, "evaluation.temperatures": (0.0,)}


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> list[Params]:
    """The parameters that reinforcement learning begins with, run by run."""
    found: list[Params] = []
    reinforce = loop._Run._reinforce

    def noted(self: loop._Run, base: Params) -> Params:
        found.append(jax.tree.map(np.asarray, base))
        return reinforce(self, base)

    monkeypatch.setattr(loop._Run, "_reinforce", noted)
    return found


def test_the_base_of_another_run_is_taken_and_kept(
    settings: dict[str, Any], tmp_path: Path, bases: list[Params]
) -> None:
    def begin(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        experiment = Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / name))
        return run(with_overrides(experiment, settings | WITHOUT_LEARNING | changes))

    first = begin("first", {"warmup.steps": 12})
    path = str(tmp_path / "first")
    other = {"seed": 1, "warmup.path": path, "rl.loss_fn": "cispo"}
    second = begin("second", other)
    assert second["agents"]["base"]["turns"] == first["agents"]["base"]["turns"]
    assert second["seconds"]["warmup"] == 0.0

    # Refused: another decoder, another tokenizer, a warm-up that is not over, no run.
    for change, says in (
        ({"model.num_layers": 1}, "model.num_layers was 2, is 1"),
        ({"model.vocab_size": 300}, "its tokenizer.json is not that of this run"),
        ({"warmup.path": str(tmp_path)}, "there is no checkpoints/warmup"),
    ):
        with pytest.raises(SetupError, match=f"warmup.path: expected a run whose base agent fits, got .*{says}"):
            begin("refused", other | change)
        # Nothing that was wrong is held against what is right.
        assert {file.name for file in (tmp_path / "refused").iterdir()} == {".lock"}
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    config["warmup"]["steps"] = 13
    (tmp_path / "first" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="its warm-up stands at 12 of 13 updates; let it end"):
        begin("refused", other)

    # It is the second's own now: the first may go.
    (tmp_path / "first").rename(tmp_path / "gone")
    (tmp_path / "second" / "evaluation" / "final.json").unlink()
    begin("second", other)
    assert len(bases) == 3
    for again in bases[1:]:
        jax.tree.map(np.testing.assert_array_equal, again, bases[0])
