"""The summary of an evaluation as tables: for the terminal (rich), and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

AGENT_NAMES = {"base": "base", "tuned": "tuned", "bm25": "BM25", "vector": "vector", "fusion": "rank fusion"}


@dataclass(frozen=True)
class Column:
    """How one metric is shown.

    Attributes:
        metric: its key in the summary.
        title: the heading.
        scale: what the value is multiplied with, 100 for a percentage.
        digits: decimals.
        needs_policy: true where a one-shot retriever has no such thing (it samples no tokens, and writes no calls).
    """

    metric: str
    title: str
    scale: float = 1.0
    digits: int = 3
    needs_policy: bool = False


AGENT_COLUMNS = (
    Column("ndcg@10", "nDCG@10"),
    Column("ndcg@10_completed", "nDCG@10 completed"),
    Column("failure_rate", "failed %", 100.0, 1, needs_policy=True),
    Column("malformed_rate", "malformed %", 100.0, 1, needs_policy=True),
    Column("turns", "turns", digits=2),
    Column("action_tokens", "action tokens", digits=0, needs_policy=True),
    Column("seconds", "seconds", digits=2),
)
DIFFERENCE_COLUMNS = (
    Column("ndcg@10", "nDCG@10"),
    Column("ndcg@10_completed", "nDCG@10 completed"),
    Column("ndcg@10_both_completed", "nDCG@10, both completed"),
    Column("failure_rate", "failed, points", 100.0, 1),
)
DECOMPOSITION_ROWS = {
    "total": "nDCG@10",
    "failure_avoidance": "= failure avoidance",
    "newly_completed": "    newly completed",
    "newly_failed": "    newly failed",
    "ranking": "+ ranking (both completed)",
}


def agent_name(key: str) -> str:
    """The name that tables and figures show for an agent's key."""
    return AGENT_NAMES.get(key, key)


def slice_name(key: str) -> str:
    """The name that tables and figures show for a slice's key."""
    return key.replace("_", " ")


def cell(entry: Mapping[str, Any], column: Column) -> str:
    """value ± half the width of its 95 % interval; "–" where the metric has no value or doesn't apply."""
    value = entry[column.metric]
    if value is None or (column.needs_policy and not entry["action_tokens"]):
        return "–"
    low, high = entry["intervals"][column.metric]
    text = f"{column.scale * value:.{column.digits}f}"
    return text if high == low else f"{text} ±{column.scale * (high - low) / 2:.{column.digits}f}"


def difference_cell(difference: Mapping[str, Any], column: Column) -> tuple[str, str, str]:
    """("+0.123", "[+0.091, +0.155]", "p<0.001") of a difference; ("–", "", "") where it has no value."""
    if difference["value"] is None:
        return "–", "", ""
    value, low, high = (f"{column.scale * difference[key]:+.{column.digits}f}" for key in ("value", "low", "high"))
    return value, f"[{low}, {high}]", p_text(difference["p"])


def p_text(p: float) -> str:
    """ "p=0.012", or "p<0.001"."""
    return "p<0.001" if p < 0.001 else f"p={p:.3f}"


def parts(slices: Mapping[str, Any]) -> Mapping[str, Any]:
    """The slices to show beside all tasks: none where one holds them all."""
    return slices if len(slices) > 1 else {}


def blocks(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, Mapping[str, Any]]]]:
    """(heading, agent -> entry) for all tasks, and then for each slice."""
    agents = summary["agents"]
    first = next(iter(agents.values()))
    found = [(f"all tasks ({first['tasks']})", dict(agents))]
    for key, entry in parts(first["slices"]).items():
        found.append((f"{slice_name(key)} ({entry['tasks']})", {name: agents[name]["slices"][key] for name in agents}))
    return found


def with_slices(whole: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(heading, entry) of a difference over all tasks, and then over each slice."""
    return [("all tasks", whole), *((slice_name(key), entry) for key, entry in parts(whole["slices"]).items())]


def agent_table(summary: Mapping[str, Any], title: str = "") -> Table:
    """Agents x metrics, over all tasks and then per slice, each value with half the width of its interval."""
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("agent", no_wrap=True)
    for column in AGENT_COLUMNS:
        table.add_column(column.title, justify="right")
    for heading, entries in blocks(summary):
        table.add_row(Text(heading, style="italic"))
        for name, entry in entries.items():
            cells = [cell(entry, column) for column in AGENT_COLUMNS]
            table.add_row(f"  {escape(agent_name(name))}", *cells, style="bold" if name == "tuned" else None)
        table.add_section()
    return table


def status_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """A header, and for each agent that can fail the share of tasks, in per cent, that ended in each failing status."""
    statuses = list(next(iter(summary["agents"].values()))["failures_by_status"])
    rows = [["agent", *(slice_name(status) for status in statuses)]]
    for name, entry in summary["agents"].items():
        if not entry["action_tokens"]:
            continue
        rates = {**entry["failures_by_status"], "intervals": entry["intervals"]["failures_by_status"]}
        cells = [cell(rates, Column(status, slice_name(status), 100.0, 1)) for status in statuses]
        rows.append([agent_name(name), *cells])
    return rows


def status_table(summary: Mapping[str, Any]) -> Table:
    """Share of tasks, in per cent, that ended in each failing status, for agents that can fail."""
    table = Table(title="failures by status, % of tasks", title_justify="left", title_style="bold", header_style="bold")
    header, *rows = status_rows(summary)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def difference_table(summary: Mapping[str, Any]) -> Table:
    """Paired differences x metrics, over all tasks and per slice: value and p-value, then the 95 % interval."""
    table = Table(title="paired differences", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("difference", no_wrap=True)
    for column in DIFFERENCE_COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    for pair, whole in summary["differences"].items():
        table.add_row(Text(pair_name(pair), style="italic"))
        for heading, entry in with_slices(whole):
            shown = [difference_cell(entry[column.metric], column) for column in DIFFERENCE_COLUMNS]
            cells = [Text(f"{value} {p}\n{interval}".strip()) for value, interval, p in shown]
            table.add_row(f"  {escape(heading)}", *cells)
        table.add_section()
    return table


def decomposition_table(summary: Mapping[str, Any]) -> Table:
    """What tuned - base in nDCG@10 is made of, over all tasks and per slice."""
    whole = summary["differences"]["tuned-base"]
    entries = dict(with_slices(whole))
    table = Table(title="where tuned - base comes from", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("part", no_wrap=True)
    for heading in entries:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    for key, label in DECOMPOSITION_ROWS.items():
        parts = [entry["decomposition"][key] for entry in entries.values()]
        table.add_row(label, *(Text(f"{p['value']:+.3f}\n[{p['low']:+.3f}, {p['high']:+.3f}]") for p in parts))
    return table


def pair_name(pair: str) -> str:
    """ "tuned - BM25" for "tuned-bm25"."""
    return " - ".join(agent_name(name) for name in pair.split("-", 1))


def print_summary(summary: Mapping[str, Any], title: str = "", console: Console | None = None) -> None:
    """Prints the tables of a summary; readable from 120 columns on."""
    console = console or Console()
    console.print(agent_table(summary, title))
    console.print(
        "± is half the width of the 95 % bootstrap interval; a failed task counts 0 in nDCG@10; seconds are of an "
        "episode beside others, and of the compiler where it is the first of a kind",
        style="dim",
    )
    if any(entry["action_tokens"] for entry in summary["agents"].values()):
        console.print(status_table(summary))
    if summary["differences"]:
        console.print(difference_table(summary))
    if "tuned-base" in summary["differences"]:
        console.print(decomposition_table(summary))


def markdown_table(summary: Mapping[str, Any]) -> str:
    """Agents x metrics as a Markdown table, over all tasks and per slice, then the differences in nDCG@10."""
    rows = [["tasks", "agent", *(column.title for column in AGENT_COLUMNS)]]
    for heading, entries in blocks(summary):
        for index, (name, entry) in enumerate(entries.items()):
            label = f"**{agent_name(name)}**" if name == "tuned" else agent_name(name)
            rows.append([heading if index == 0 else "", label, *(cell(entry, column) for column in AGENT_COLUMNS)])
    text = markdown_rows(rows, left=2)
    if summary["differences"]:
        rows = [["difference", "tasks", *(column.title for column in DIFFERENCE_COLUMNS)]]
        for pair, whole in summary["differences"].items():
            for index, (heading, entry) in enumerate(with_slices(whole)):
                cells = [" ".join(difference_cell(entry[c.metric], c)).strip() for c in DIFFERENCE_COLUMNS]
                rows.append([pair_name(pair) if index == 0 else "", heading, *cells])
        text += "\n" + markdown_rows(rows, left=2)
    return text


def markdown_rows(rows: Sequence[Sequence[str]], left: int) -> str:
    """A header and rows as a Markdown table, the first `left` columns aligned to the left."""
    rule = ["---" if i < left else "---:" for i in range(len(rows[0]))]
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in [cells[0], rule, *cells[1:]])
