"""Learning curves and the comparison of agents, as matplotlib figures.

Figures are built as `Figure` objects, never through pyplot: no global state, no display, nothing to close.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from searchrl_jax.evaluation.tables import agent_name, parts, slice_name

VALIDATION = "val/"

# Okabe & Ito 2008: colours that people with each kind of colour blindness can tell apart (yellow and black left out).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
AGENT_COLOURS = {"tuned": "#0072B2", "base": "#56B4E9", "fusion": "#E69F00", "bm25": "#999999", "vector": "#CCCCCC"}
LINE_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Panel:
    """One panel of the learning curves.

    Attributes:
        title: what it shows.
        label: of the vertical axis, with the unit.
        series: key in the metrics rows -> name in the legend. A key's validation points are under "val/" + key.
        scale: what values are multiplied with, 100 for a percentage.
    """

    title: str
    label: str
    series: Mapping[str, str]
    scale: float = 1.0


PANELS = (
    Panel("Reward", "mean reward", {"reward": "reward"}),
    Panel("Ranking", "nDCG@10", {"ndcg@10": "all (failed = 0)", "ndcg@10_completed": "completed"}),
    Panel(
        "Failures",
        "% of episodes",
        {
            "failure_rate": "all",
            "failures/turn_limit": "turn limit",
            "failures/token_limit": "token limit",
            "failures/context_limit": "context limit",
            "failures/tool_failure": "tool failure",
        },
        scale=100.0,
    ),
    Panel("Malformed calls", "% of calls", {"malformed_rate": "malformed"}, scale=100.0),
    Panel("Turns", "turns per episode", {"turns": "turns"}),
    Panel("Action tokens", "tokens per episode", {"action_tokens": "tokens"}),
    Panel("Entropy", "nats per token", {"entropy": "entropy"}),
    Panel("Policy movement", "KL, nats per token", {"kl": "behaviour to current"}),
    Panel("Gradient norm", "norm before clipping", {"grad_norm": "norm"}),
)


def learning_curves(rows: Sequence[Mapping[str, Any]], panels: Sequence[Panel] = PANELS) -> Figure:
    """Training curves over steps, with validation points on top; a panel is drawn where one of its series is present.

    A training series is drawn faint, and its running mean over a tenth of the run strong; validation points are joined
    dots.

    Args:
        rows: rows of `metrics.jsonl`: "step" and any of the panels' keys. Keys may be absent from some rows (validation
            runs only every so often); None and NaN are left out.

    Raises:
        ValueError: no row holds a value for any panel.
    """
    shown = [panel for panel in panels if any(_has(rows, key) for key in panel.series)]
    if not shown:
        raise ValueError(f"none of the {len(rows)} rows holds a metric to plot, such as 'reward' or 'val/ndcg@10'")
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for index, panel in enumerate(shown):
        _draw_panel(axes[index], rows, panel)
    for unused in axes[len(shown) :]:
        unused.set_axis_off()
    return figure


def agent_bars(summary: Mapping[str, Any], metric: str = "ndcg@10", label: str = "nDCG@10 (failed = 0)") -> Figure:
    """Bars of every agent over all tasks and per slice, with 95 % intervals as error bars.

    Args:
        summary: as `summary.summarise` returns it.
        metric: its key in the summary; an agent without a value has no bar.
        label: of the vertical axis.
    """
    agents = summary["agents"]
    first = next(iter(agents.values()))
    groups = [f"all tasks\n(n = {first['tasks']})"]
    # A user's own name may hold a dollar, which would begin a formula.
    slices = parts(first["slices"])
    names = {key: slice_name(key).replace("$", r"\$") for key in slices}
    groups += [f"{names[key]}\n(n = {entry['tasks']})" for key, entry in slices.items()]
    # At least as wide as the legend, one line above the axes.
    figure = Figure(figsize=(max(2.0 + 1.9 * len(groups), 1.3 * len(agents)), 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(agents)
    spare = cycle(colour for colour in COLOURS if colour not in AGENT_COLOURS.values())
    for index, (name, whole) in enumerate(agents.items()):
        entries = [whole, *(whole["slices"][key] for key in slices)]
        offset = (index - (len(agents) - 1) / 2) * width
        places = [group + offset for group, entry in enumerate(entries) if entry[metric] is not None]
        kept = [entry for entry in entries if entry[metric] is not None]
        values = np.array([entry[metric] for entry in kept])
        low, high = np.array([entry["intervals"][metric] for entry in kept]).reshape(-1, 2).T
        axes.bar(
            places,
            values,
            0.92 * width,
            # Percentile bounds of a skewed statistic can pass the value itself; matplotlib refuses negative lengths.
            yerr=np.maximum([values - low, high - values], 0.0),
            color=AGENT_COLOURS.get(name) or next(spare),
            error_kw={"elinewidth": 1.0, "ecolor": "#333333"},
            label=agent_name(name),
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    _plain(axes)
    axes.legend(frameon=False, ncols=len(agents), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    return figure


def save_png(figure: Figure, path: str | Path) -> Path:
    """Writes the figure as a PNG at 150 dots per inch, making its folder, and returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
    return path


def _draw_panel(axes: Axes, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    present = [key for key in panel.series if _has(rows, key)]
    for index, key in enumerate(present):
        colour, style = COLOURS[index % len(COLOURS)], LINE_STYLES[index % len(LINE_STYLES)]
        steps, values = _series(rows, key)
        window = max(1, len(values) // 20)
        if len(values):
            smooth = _running_mean(values, window) * panel.scale
            if window > 1:
                axes.plot(steps, values * panel.scale, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth, color=colour, linestyle=style, linewidth=1.6, label=panel.series[key])
        steps, values = _series(rows, VALIDATION + key)
        if len(values):
            axes.plot(
                steps,
                values * panel.scale,
                color=colour,
                linewidth=0.8,
                marker="o",
                markersize=4.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                # Colours tell what is what; the first says for all that points on thin lines are validation.
                label="validation" if key == present[0] else None,
            )
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(panel.label, fontsize=9)
    _plain(axes)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize=8)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def _has(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(len(_series(rows, name)[1]) for name in (key, VALIDATION + key))


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a key, in the order of steps, without None and NaN."""
    found = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    pairs = sorted(pair for pair in found if not np.isnan(pair[1]))
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over up to `window` values on either side; fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window + 1, 0), np.minimum(index + window, len(values))
    return (sums[high] - sums[low]) / (high - low)
