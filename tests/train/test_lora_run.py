"""The whole job with adapters: what its checkpoints hold, that it goes on bit for bit, and what it plays at the end."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_resume import arrays, rows

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.models.axes import ADAPTED
from searchrl_jax.train import loop

CHANGES = {
    "lora.lora_rank": 4,
    "lora.lora_alpha": 8.0,
    "lora.lora_plus_lr_ratio": 4.0,
    # So short a warm-up wins no reward: with this method failing alike teaches, too.
    "rl.advantage_method": "monte_carlo",
    "rl.advantage_normalization": False,
    "rl.kl_coef": 0.01,
    "rl.minibatches": 1,
    "warmup.steps": 30,
    "schedule.max_steps": 3,
    "schedule.val_every": 0,
}


@pytest.mark.slow
def test_killed_and_started_again_a_run_of_adapters_ends_bit_for_bit_the_same(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played: list[dict[str, Any]] = []
    monkeypatch.setattr(
        loop, "compare_and_report", lambda *args, **_: played.append(jax.tree.map(np.array, args[4])) or {}
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write = loop._write_trajectories

    def write_and_look(path: Path, trajectories: Any) -> None:
        write(path, trajectories)
        if path == whole / "trajectories" / "step_000002.jsonl":
            shutil.copytree(whole, broken)  # what a kill at this moment would leave

    monkeypatch.setattr(loop, "_write_trajectories", write_and_look)
    for workdir in (whole, broken):
        loop.run(with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(workdir)), settings | CHANGES))
    assert capsys.readouterr().out.count("resumed after step 1 of 3") == 1
    base = arrays(broken, "warmup")

    expected, found = arrays(whole, "rl"), arrays(broken, "rl")
    assert {name for name in found if name.startswith("params/")} == {
        f"params/layers/{name}/{part}" for name in ADAPTED for part in "ab"
    }
    assert max(array.size for array in found.values()) < base["params/embedding"].size
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name, strict=True)
    assert rows(broken / "metrics.jsonl") == rows(whole / "metrics.jsonl")
    steps = rows(broken / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3] and all(row["grad_norm"] > 0 for row in steps)
    for row in steps:  # the engine sampled from what the learner trains
        assert row["learner/ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert row["learner/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[0]["learner/reference_kl"] == pytest.approx(0, abs=1e-6) != steps[-1]["learner/reference_kl"]

    # The base is still what the warm-up left; the tuned agent is the same base with the adapters beside it.
    for agents in played:
        assert agents["base"].keys() == base_names(base) == agents["tuned"].keys() - {"lora"}
        for name in ADAPTED:
            w, pair = base[f"params/layers/{name}"], agents["tuned"]["lora"]["layers"][name]
            a, b = (found[f"params/layers/{name}/{part}"] for part in "ab")
            for agent in agents.values():
                np.testing.assert_array_equal(agent["layers"][name], w, err_msg=name)
            np.testing.assert_array_equal(pair["a"], a, err_msg=name)
            np.testing.assert_array_equal(pair["b"], 2.0 * b, err_msg=name)
            assert b.any()
        np.testing.assert_array_equal(agents["tuned"]["embedding"], base["params/embedding"])


def base_names(base: dict[str, Any]) -> set[str]:
    return {name.split("/")[1] for name in base if name.startswith("params/")}
