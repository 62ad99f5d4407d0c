"""One experiment trained in turns and asynchronously, side by side, with tools that are slow.

python benchmarks/async_vs_sync.py --exp=mtrl_search [--scale=local] [--tool-latency=0.2] [--steps-off-policy=3]
    [--seeds=0,1,2] [--workdir=runs/async_vs_sync] [any setting of the experiment]

Prints the reward of each step and the wall-clock up to it, means over the seeds, and draws them in curves.png. Below
come the tuned agents on the test tasks, seed by seed, and how far the asynchronous one is above the other. Both runs of
a seed begin with one base agent: that of --warmup.path, in which {seed} stands for the seed, or else the one that the
run in turns makes. A run that is complete in its directory is read, not run again; one that was stopped goes on, and
its time counts from both parts.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from searchrl_jax.config.cli import experiments, parse
from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.evaluation.figures import COLOURS, LINE_STYLES, save_png
from searchrl_jax.evaluation.study import against_first_table, read_run
from searchrl_jax.evaluation.tables import markdown_rows
from searchrl_jax.train.interrupt import Interrupted
from searchrl_jax.train.loop import SetupError, run
from searchrl_jax.train.tracker import read_rows

ROOT = Path(__file__).resolve().parent.parent
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]  # reward, seconds since the first step began, mean age; by step


class Delayed:
    """A retriever that takes `seconds` longer."""

    def __init__(self, retriever: Any, seconds: float) -> None:
        self._retriever, self._seconds = retriever, seconds

    def search(self, query: str, k: int = 10, where: Any = None) -> Any:
        """What the retriever finds, later."""
        time.sleep(self._seconds)
        return self._retriever.search(query, k=k, where=where)


def main(argv: Sequence[str]) -> int:
    """Runs what is missing and prints the comparison.

    Returns:
        The exit status: 0 done or cleanly interrupted, 2 called wrongly.
    """
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tool-latency", type=float, default=0.2, help="seconds added to every search")
    options.add_argument("--steps-off-policy", type=int, default=3, help="bound of the asynchronous runs")
    options.add_argument("--seeds", type=_seeds, default=[0], help="0,1,2")
    options.add_argument(
        "--workdir", type=Path, default="runs/async_vs_sync", help="a directory for each run lies in it"
    )
    chosen, rest = options.parse_known_args(argv)
    load, names = experiments(ROOT / "experiments", lambda: "local")
    experiment = parse(rest, load, names, prog="benchmarks/async_vs_sync.py").experiment

    path = experiment.warmup.path
    modes = {"in turns": 0, "asynchronous": chosen.steps_off_policy}
    workdirs: dict[str, list[Path]] = {mode: [] for mode in modes}
    try:
        for seed in chosen.seeds:
            base = path.replace("{seed}", str(seed))
            for mode, bound in modes.items():
                workdir = chosen.workdir / f"bound_{bound}_latency_{chosen.tool_latency:g}_seed_{seed}"
                changes = {"seed": seed, "rollout.max_steps_off_policy": bound, "warmup.path": base}
                experiment = with_overrides(experiment, changes | {"workdir": str(workdir)})
                run(experiment, lambda tool: Delayed(tool, chosen.tool_latency))
                workdirs[mode].append(workdir)
                base = base or str(workdir)
    except Interrupted as interrupted:
        print(interrupted)
        return 0
    except SetupError as error:
        print(f"benchmarks/async_vs_sync.py: error: {error}", file=sys.stderr)
        return 2

    curves = {mode: _curves(folders) for mode, folders in workdirs.items()}
    print(
        f"\ntools take {chosen.tool_latency:g} s longer; means over {len(chosen.seeds)} seeds\n\n{_steps_table(curves)}"
    )
    print(f"figure: {_draw(curves, chosen.workdir / 'curves.png')}\n\n{_finals_table(chosen.seeds, workdirs)}")
    for seed, *pair in zip(chosen.seeds, *workdirs.values(), strict=True):
        runs = [(f"seed {seed}, {mode}", read_run(workdir)[1]) for mode, workdir in zip(modes, pair, strict=True)]
        print(against_first_table(runs, pair))
    return 0


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers parted by commas, as in 0,1,2, got {text!r}") from None


def _curves(workdirs: Sequence[Path]) -> Curves:
    """Means over the runs."""
    names = ("reward", "timing_s/step", "staleness/mean")
    runs = [[row for row in read_rows(workdir / "metrics.jsonl") if row["step"]] for workdir in workdirs]
    reward, seconds, age = (np.mean([[row[name] for row in rows] for rows in runs], axis=0) for name in names)
    return reward, np.cumsum(seconds), age


def _steps_table(curves: Mapping[str, Curves]) -> str:
    rows = [["step", *(f"{name}, {mode}" for mode in curves for name in ("reward", "seconds", "age"))]]
    for index in range(min(len(reward) for reward, _, _ in curves.values())):
        cells = (
            (f"{reward[index]:.3f}", f"{clock[index]:.0f}", f"{age[index]:.2f}")
            for reward, clock, age in curves.values()
        )
        rows.append([str(index + 1), *(cell for three in cells for cell in three)])
    return markdown_rows(rows, left=0)


def _finals_table(seeds: Sequence[int], workdirs: Mapping[str, Sequence[Path]]) -> str:
    rows = [["seed", "mode", "RL seconds", "tuned nDCG@10", "failed"]]
    for index, seed in enumerate(seeds):
        for mode, folders in workdirs.items():
            final = read_run(folders[index])[1]["final"]
            tuned = final["agents"]["tuned"]
            low, high = tuned["intervals"]["ndcg@10"]
            score, failed = f"{tuned['ndcg@10']:.3f} [{low:.3f}, {high:.3f}]", f"{100 * tuned['failure_rate']:.1f} %"
            rows.append([str(seed), mode, f"{final['seconds']['rl']:.0f}", score, failed])
    return markdown_rows(rows, left=2)


def _draw(curves: Mapping[str, Curves], path: Path) -> Path:
    """Reward over steps and over wall-clock."""
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    by_step, by_clock = figure.subplots(1, 2, sharey=True)
    for (mode, (reward, clock, _)), colour, style in zip(curves.items(), COLOURS, LINE_STYLES, strict=False):
        by_step.plot(np.arange(1, len(reward) + 1), reward, style, color=colour, label=mode)
        by_clock.plot(clock / 60, reward, style, color=colour, label=mode)
    by_step.set(xlabel="step", ylabel="mean reward")
    by_clock.set(xlabel="minutes of reinforcement learning")
    by_clock.legend(frameon=False)
    return save_png(figure, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
