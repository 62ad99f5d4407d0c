"""What a person reads while a run goes on."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

ALARM_STEPS = 10


class Progress:
    """Estimates the time left from the pace so far in this process."""

    def __init__(self, total: int) -> None:
        self._total, self._began = total, time.perf_counter()

    def left(self, done: int) -> str:
        """Time left after `done` of the items, such as "3 min"."""
        elapsed = time.perf_counter() - self._began
        return duration(elapsed / done * (self._total - done)) if done else "unknown"


def duration(seconds: float) -> str:
    """`seconds` in the unit that reads best: "42 s", "7 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def search_alarm(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning where the policy searches more and finds no better: what came before several published collapses.

    The last 10 steps with a valid rollout against the 10 before: searches per episode up by more than a fifth, nDCG@10
    up by less than 0.01.

    Args:
        rows: of `metrics.jsonl`, in order.
    """
    # A step whose every tool failed has no nDCG.
    steps = [row for row in rows if row["step"] and row["ndcg@10"] is not None][-2 * ALARM_STEPS :]
    if len(steps) < 2 * ALARM_STEPS:
        return None
    before, after = (
        {name: sum(row[name] for row in part) / ALARM_STEPS for name in ("searches", "ndcg@10")}
        for part in (steps[:ALARM_STEPS], steps[ALARM_STEPS:])
    )
    if after["searches"] <= 1.2 * before["searches"] or after["ndcg@10"] >= before["ndcg@10"] + 0.01:
        return None
    return (
        f"warning: in the last {ALARM_STEPS} steps searches rose from {before['searches']:.2f} to "
        f"{after['searches']:.2f} an episode, and nDCG@10 did not ({before['ndcg@10']:.3f} to "
        f"{after['ndcg@10']:.3f}); see trajectories/ for whether the tools find anything"
    )


def or_dash(value: float, digits: int) -> str:
    """`value` with so many digits behind the point; a dash for NaN, a mean over nothing."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def train_line(step: int, total: int, metrics: Mapping[str, float], left: str) -> str:
    """One training step in one line of the terminal; without an entropy where no group had anything to teach."""
    failures = {name: share for name, share in metrics.items() if name.startswith("failures/")}
    split = ", ".join(f"{name.removeprefix('failures/')} {share:.1%}" for name, share in failures.items())
    return (
        f"step {step}/{total}  reward {metrics['reward']:.3f}  nDCG@10 {metrics['ndcg@10']:.3f}  "
        f"failed {metrics['failure_rate']:.1%}{f' ({split})' if split else ''}  "
        f"malformed {metrics['malformed_rate']:.1%}  turns {metrics['turns']:.2f}  "
        f"entropy {or_dash(metrics['entropy'], 2)}  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s  {metrics['timing_s/step']:.1f} s  left {left}"
    )
