"""A run's report as one HTML file that opens anywhere: tables, figures, and trajectories to read turn by turn.

Nothing is loaded from elsewhere: figures are embedded, there is no script, and a content security policy forbids both.
All text is escaped, since questions, observations and the policy's own output are untrusted.
"""

import base64
import html
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from searchrl_jax.evaluation import tables

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5d6670; --line: #d9dee3; --paper: #ffffff; --panel: #f5f7f9;
  --accent: #0072b2; --good: #00724f; --good-soft: #d8f0e6; --bad: #a33f00; --bad-soft: #fbe5d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa4ae; --line: #363d44; --paper: #15181b;
  --panel: #1e2327; --accent: #6fbef0; --good: #6fd6ae; --good-soft: #173d30; --bad: #f3a271; --bad-soft: #46291a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.5rem 6rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
nav a { margin-right: 1.25rem; } a { color: var(--accent); }
.note { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
tr.group td { padding-top: .9rem; color: var(--soft); } tr.strong td { font-weight: 600; }
td small { color: var(--soft); font-size: .8rem; font-weight: 400; }
figure { margin: 1rem 0 2rem; } figcaption { color: var(--soft); font-size: .875rem; margin-bottom: .4rem; }
img { max-width: 100%; background: #ffffff; border: 1px solid var(--line); border-radius: 6px; padding: 8px; }
article { border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem; margin: 1rem 0; }
article > p { margin: .2rem 0 .5rem; }
details > summary { cursor: pointer; padding: .35rem 0; }
ol.turns { list-style: none; margin: .5rem 0; padding: 0; }
ol.turns > li { border-left: 3px solid var(--line); padding: 0 0 .25rem .9rem; margin: .9rem 0; }
.label { color: var(--soft); font-size: .8rem; }
pre { margin: .2rem 0 .6rem; padding: .6rem .8rem; background: var(--panel); border-radius: 6px;
  overflow-wrap: anywhere; white-space: pre-wrap; font: .8125rem/1.45 ui-monospace, monospace; unicode-bidi: isolate; }
pre.action { border-left: 3px solid var(--accent); }
.tag { display: inline-block; padding: 0 .5rem; border-radius: 1rem; font-size: .8rem; background: var(--panel); }
.good, mark { background: var(--good-soft); color: var(--good); }
.bad { background: var(--bad-soft); color: var(--bad); }
mark { border-radius: 3px; padding: 0 .15rem; }
ul.documents, ol.documents { margin: .25rem 0 .6rem; padding-left: 1.75rem; font-size: .875rem; }
"""


def write_report(
    path: str | Path,
    summaries: Mapping[str, Mapping[str, Any]],
    figures: Mapping[str, Figure | str | Path],
    trajectories: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    title: str = "A search agent, before and after training",
) -> Path:
    """Writes the report and returns its path. The file appears whole or not at all.

    Args:
        path: the HTML file; its folder is made.
        summaries: heading ("temperature 1", "greedy", ...) -> what `summary.summarise` returned; in this order.
        figures: caption -> a `Figure`, or the path of a PNG.
        trajectories: one mapping an episode. Episodes of one task are shown together, in the order given. Keys:
            "task_id", "slice", "question", "agent", "status", "reward" (None where there is none, as after a tool
            failure), "turns" [{"action", "observation"}] (an observation may be None: the episode ended there),
            "ranking" [{"title", "grade"}] as submitted, best first; and, optional, "relevant" [{"title", "grade"}]:
            what there was to find. Titles of relevant documents are marked wherever an observation shows them.
        config: the run's configuration, JSON-ready.
        title: heading of the page.

    Raises:
        ValueError: a trajectory lacks one of its keys.
    """
    sections = [
        ("results", "Results", "".join(_results(heading, summary) for heading, summary in summaries.items())),
        ("figures", "Figures", "".join(_figure(caption, figure) for caption, figure in figures.items())),
        ("trajectories", "Trajectories", _trajectories(trajectories)),
        ("configuration", "Configuration", _configuration(config)),
    ]
    shown = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in shown)
    body = "".join(f'<section id="{anchor}"><h2>{name}</h2>{content}</section>\n' for anchor, name, content in shown)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{_text(title)}</h1><nav>{links}</nav>\n{body}</body></html>\n"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # A policy can write an escaped lone surrogate into its JSON; UTF-8 has no such character, so it is shown escaped.
    partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)
    return path


def _results(heading: str, summary: Mapping[str, Any]) -> str:
    parts = [f"<h3>{_text(heading)}</h3>", _agents(summary)]
    parts.append(
        '<p class="note">Value ± half the width of its 95 % bootstrap interval over tasks. A failed task counts 0 in '
        "nDCG@10; “completed” leaves it out. Seconds are of an episode beside others, and of the compiler where "
        "it is the first of a kind.</p>"
    )
    if summary["differences"]:
        parts.append(_folded("Failures by status", _statuses(summary)))
        parts.append(_folded("Paired differences, with 95 % intervals and permutation p-values", _differences(summary)))
    if "tuned-base" in summary["differences"]:
        parts.append(_folded("Where the gain comes from: failure avoidance and ranking", _decomposition(summary)))
    return "".join(parts)


def _agents(summary: Mapping[str, Any]) -> str:
    rows = []
    for heading, entries in tables.blocks(summary):
        rows.append(_group(heading, len(tables.AGENT_COLUMNS) + 1))
        for name, entry in entries.items():
            cells = [tables.agent_name(name), *(tables.cell(entry, column) for column in tables.AGENT_COLUMNS)]
            rows.append(_row(map(_text, cells), "strong" if name == "tuned" else ""))
    return _table(["agent", *(column.title for column in tables.AGENT_COLUMNS)], rows)


def _statuses(summary: Mapping[str, Any]) -> str:
    header, *rows = tables.status_rows(summary)
    return _table(["agent", *header[1:]], [_row(map(_text, row)) for row in rows])


def _differences(summary: Mapping[str, Any]) -> str:
    rows = []
    for pair, whole in summary["differences"].items():
        rows.append(_group(tables.pair_name(pair), len(tables.DIFFERENCE_COLUMNS) + 1))
        for heading, entry in tables.with_slices(whole):
            cells = [_text(heading)]
            for column in tables.DIFFERENCE_COLUMNS:
                value, interval, p = tables.difference_cell(entry[column.metric], column)
                cells.append(f"{_text(value)} <small>{_text(interval)} {_text(p)}</small>")
            rows.append(_row(cells))
    return _table(["difference", *(column.title for column in tables.DIFFERENCE_COLUMNS)], rows)


def _decomposition(summary: Mapping[str, Any]) -> str:
    entries = tables.with_slices(summary["differences"]["tuned-base"])
    rows = []
    for key, label in tables.DECOMPOSITION_ROWS.items():
        cells = [_text(label)]
        for _, entry in entries:
            part = entry["decomposition"][key]
            cells.append(f"{part['value']:+.3f} <small>[{part['low']:+.3f}, {part['high']:+.3f}]</small>")
        rows.append(_row(cells, "strong" if key == "total" else ""))
    return _table(["part", *(heading for heading, _ in entries)], rows)


def _figure(caption: str, figure: Figure | str | Path) -> str:
    if isinstance(figure, Figure):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        data = buffer.getvalue()
    else:
        data = Path(figure).read_bytes()
    source = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
    text = _text(caption)
    return f'<figure><figcaption>{text}</figcaption><img alt="{text}" src="{source}"></figure>'


def _trajectories(trajectories: Sequence[Mapping[str, Any]]) -> str:
    required = {"task_id", "slice", "question", "agent", "status", "reward", "turns", "ranking"}
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for index, trajectory in enumerate(trajectories):
        if lacking := sorted(required - trajectory.keys()):
            raise ValueError(f"trajectory {index} lacks {lacking}; a trajectory needs the keys {sorted(required)}")
        by_task.setdefault(trajectory["task_id"], []).append(trajectory)
    if not by_task:
        return ""
    note = (
        '<p class="note">Each task with what its agents did: open a line to read it turn by turn. '
        "<mark>Marked</mark> titles are relevant documents.</p>"
    )
    return note + "".join(_task(episodes) for episodes in by_task.values())


def _task(episodes: Sequence[Mapping[str, Any]]) -> str:
    first = episodes[0]
    relevant = first.get("relevant", [])
    parts = [f"<p>{_text(first['question'])}</p>"]
    if relevant:
        parts.append(f'<span class="label">to be found</span>{_documents(relevant, "ul")}')
    parts += [_episode(episode) for episode in episodes]
    label = f"{tables.slice_name(first['slice'])} · {first['task_id']}"
    return f'<article><span class="label">{_text(label)}</span>{"".join(parts)}</article>\n'


def _episode(episode: Mapping[str, Any]) -> str:
    listed = [*episode.get("relevant", []), *episode["ranking"]]
    grades = {document["title"]: document["grade"] for document in listed if _is_relevant(document)}
    turns = []
    for number, turn in enumerate(episode["turns"], start=1):
        text = f'<span class="label">turn {number}</span><pre class="action">{_text(turn["action"])}</pre>'
        if turn["observation"] is not None:
            text += f"<pre>{_marked(turn['observation'], grades)}</pre>"
        turns.append(f"<li>{text}</li>")
    kind = "good" if episode["status"] == "submitted" else "bad"
    tag = f'<span class="tag {kind}">{_text(tables.slice_name(episode["status"]))}</span>'
    reward = "no reward" if episode["reward"] is None else f"reward {episode['reward']:.3f}"
    count = f"{len(turns)} turn{'s' if len(turns) != 1 else ''}"
    line = f"<b>{_text(tables.agent_name(episode['agent']))}</b> {tag} {reward}, {count}"
    ranking = _documents(episode["ranking"], "ol")
    if episode["ranking"]:
        ranking = f'<span class="label">submitted ranking</span>{ranking}'
    return f'<details><summary>{line}</summary><ol class="turns">{"".join(turns)}</ol>{ranking}</details>'


def _documents(documents: Iterable[Mapping[str, Any]], tag: str) -> str:
    items = []
    for document in documents:
        title = _text(document["title"])
        if _is_relevant(document):
            title = f"<mark>{title}</mark> <small>grade {document['grade']:g}</small>"
        items.append(f"<li>{title}</li>")
    return f'<{tag} class="documents">{"".join(items)}</{tag}>'


def _is_relevant(document: Mapping[str, Any]) -> bool:
    return document["grade"] is not None and document["grade"] > 0


def _marked(text: str, grades: Mapping[str, float]) -> str:
    """The text, escaped, with each of the titles in a <mark> that tells its grade."""
    titles = sorted((title for title in grades if title), key=len, reverse=True)
    if not titles:
        return _text(text)
    # A title inside a longer dotted name is another document: numpy.fft must not light up in numpy.fft.fft.
    pattern = rf"(?<![\w.])({'|'.join(map(re.escape, titles))})(?!\w|\.\w)"
    pieces = re.split(pattern, text)
    return "".join(
        f'<mark title="grade {grades[piece]:g}">{_text(piece)}</mark>' if index % 2 else _text(piece)
        for index, piece in enumerate(pieces)
    )


def _configuration(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    return _folded("Every setting of this run", f"<pre>{_text(json.dumps(config, indent=2, ensure_ascii=False))}</pre>")


def _folded(heading: str, content: str) -> str:
    return f"<details><summary>{_text(heading)}</summary>{content}</details>"


def _table(header: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: Iterable[str], style: str = "") -> str:
    return f'<tr class="{style}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _group(heading: str, columns: int) -> str:
    return f'<tr class="group"><td colspan="{columns}">{_text(heading)}</td></tr>'


def _text(value: str) -> str:
    return html.escape(value, quote=True)
