"""One experiment trained in turns and asynchronously, side by side, with tools that are slow.

python benchmarks/async_vs_sync.py --exp=mtrl_search [--scale=local] [--tool-latency=0.2] [--steps-off-policy=3]
    [--seeds=0,1,2] [--workdir=runs/async_vs_sync] [any setting of the experiment]

Prints the reward of each step and the wall-clock up to it, means over the seeds, and below them the seconds of
reinforcement learning and the tuned agent's nDCG@10 on the test tasks, seed by seed. A run that is complete in its
directory is read, not run again; one that was stopped goes on, and its time counts from both parts.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


class Delayed:
    """A retriever that takes `seconds` longer."""

    def __init__(self, retriever: Any, seconds: float) -> None:
        self._retriever, self._seconds = retriever, seconds

    def search(self, query: str, k: int = 10, where: Any = None) -> Any:
        """What the retriever finds, later."""
        time.sleep(self._seconds)
        return self._retriever.search(query, k=k, where=where)


def main(argv: Sequence[str]) -> int:
    """Runs what is missing and prints the comparison."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tool-latency", type=float, default=0.2, help="seconds added to every search")
    options.add_argument("--steps-off-policy", type=int, default=3, help="bound of the asynchronous runs")
    options.add_argument("--seeds", default="0", help="as in 0,1,2")
    options.add_argument("--workdir", default="runs/async_vs_sync", help="a run directory for each run lies in it")
    chosen, rest = options.parse_known_args(argv)

    from searchrl_jax.config.cli import Experimenter, parse
    from searchrl_jax.config.overlays import with_overrides
    from searchrl_jax.train.loop import run
    from searchrl_jax.train.tracker import read_rows

    def load(name: str) -> Experimenter:
        spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return lambda scale: module.config("local" if scale == "auto" else scale)

    names = sorted(path.stem for path in (ROOT / "experiments").glob("*.py"))
    experiment = parse(rest, load, names, prog="benchmarks/async_vs_sync.py").experiment
    modes = {"in turns": 0, "asynchronous": chosen.steps_off_policy}
    rows: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in modes}
    finals: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for seed in map(int, chosen.seeds.split(",")):
        for mode, bound in modes.items():
            workdir = Path(chosen.workdir) / f"bound_{bound}_latency_{chosen.tool_latency:g}_seed_{seed}"
            changes = {"seed": seed, "workdir": str(workdir), "rollout.max_steps_off_policy": bound}
            summary = run(with_overrides(experiment, changes), lambda tool: Delayed(tool, chosen.tool_latency))
            rows[mode].append([row for row in read_rows(workdir / "metrics.jsonl") if row["step"]])
            finals[mode].append(summary)
    print(f"\ntools take {chosen.tool_latency:g} s longer; means over seeds {chosen.seeds}\n")
    print("| step | " + " | ".join(f"reward {mode} | seconds {mode} | age {mode}" for mode in modes) + " |")
    print("|---:" * (1 + 3 * len(modes)) + "|")
    curves = {mode: _curves(rows[mode]) for mode in modes}
    for index in range(len(rows["in turns"][0])):
        cells = " | ".join(
            f"{reward[index]:.3f} | {clock[index]:.0f} | {age[index]:.2f}" for reward, clock, age in curves.values()
        )
        print(f"| {index + 1} | {cells} |")
    print("\n| seed | mode | RL seconds | tuned nDCG@10 | failed % |\n|---:|---|---:|---:|---:|")
    for index, seed in enumerate(chosen.seeds.split(",")):
        for mode in modes:
            final = finals[mode][index]
            tuned, seconds = final["agents"]["tuned"], final["seconds"]["rl"]
            low, high = tuned["intervals"]["ndcg@10"]
            print(
                f"| {seed} | {mode} | {seconds:.0f} | {tuned['ndcg@10']:.3f} [{low:.3f}, {high:.3f}] "
                f"| {100 * tuned['failure_rate']:.1f} |"
            )
    return 0


def _curves(runs: Sequence[Sequence[dict[str, Any]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reward, seconds since the first step began, and mean age, by step; means over the runs."""
    names = ("reward", "timing_s/step", "staleness/mean")
    reward, seconds, age = (np.mean([[row[name] for row in run] for run in runs], axis=0) for name in names)
    return reward, np.cumsum(seconds), age


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
