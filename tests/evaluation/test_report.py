"""Tables, figures and the HTML report: what they show, and that untrusted text stays text."""

import io
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from rich.console import Console

from searchrl_jax.evaluation.figures import Panel, agent_bars, learning_curves, save_png
from searchrl_jax.evaluation.report import write_report
from searchrl_jax.evaluation.summary import EpisodeRecord, summarise
from searchrl_jax.evaluation.tables import markdown_table, print_summary

PNG = b"\x89PNG\r\n\x1a\n"


def episodes(quality: float, failures: int, one_shot: bool = False) -> list[EpisodeRecord]:
    rng = np.random.default_rng(int(100 * quality))
    return [
        EpisodeRecord(
            task_id=f"t{i}",
            slice="bridge" if i % 2 else "known_item",
            status=None if one_shot else "turn_limit" if i < failures else "submitted",
            ndcg=0.0 if i < failures else float(np.clip(rng.normal(quality, 0.1), 0, 1)),
            turns=1 if one_shot else 3,
            action_tokens=0 if one_shot else int(rng.integers(50, 90)),
            seconds=0.1,
            calls=1 if one_shot else 3,
            malformed_calls=0,
        )
        for i in range(40)
    ]


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    agents = {"base": episodes(0.4, 12), "tuned": episodes(0.7, 1), "bm25": episodes(0.5, 0, one_shot=True)}
    return summarise(agents, resamples=300)


def printed(summary: dict[str, Any], width: int = 120) -> str:
    stream = io.StringIO()
    print_summary(summary, "temperature 1", Console(file=stream, width=width))
    return stream.getvalue()


def trajectory(**changes: Any) -> dict[str, Any]:
    return {
        "task_id": "bridge-1",
        "slice": "bridge",
        "question": "Which functions does the page point to?",
        "agent": "tuned",
        "status": "submitted",
        "reward": 0.83,
        "turns": [
            {
                "action": "<tool_call>{}</tool_call>",
                "observation": "[1] numpy.polyfit. See numpy.polyfit2, my.numpy.polyfit",
            },
            {"action": "submit", "observation": None},
        ],
        "ranking": [{"title": "numpy.polyval", "grade": 2}, {"title": "numpy.svd", "grade": 0}],
        "relevant": [{"title": "numpy.polyfit", "grade": 1}, {"title": "numpy.polyval", "grade": 2}],
    } | changes


def heights_of(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=np.float64)


class Tags(HTMLParser):
    """The tags, attributes and text of a page, and whether every tag is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_terminal_tables_fit_120_columns_and_show_the_numbers(summary: dict[str, Any]) -> None:
    text = printed(summary)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "…" not in text
    assert f"{summary['agents']['tuned']['ndcg@10']:.3f} ±" in text
    assert (
        f"{summary['differences']['tuned-base']['ndcg@10']['value']:+.3f} p=0.003" in text
    )  # 1 / 301, the least that 300 permutations give
    assert "30.0 ±" in text  # the base fails 12 of 40
    for words in ("known item (20)", "bridge (20)", "tuned - BM25", "failure avoidance", "turn limit"):
        assert words in text


def test_tables_show_what_has_no_value_as_a_dash_and_names_with_brackets_as_they_are() -> None:
    failed = [
        EpisodeRecord(
            f"t{i}", part, "token_limit", 0.0, turns=2, action_tokens=9, seconds=1, calls=1, malformed_calls=0
        )
        for i, part in enumerate(["[red]odd", "[red]odd", "other"])
    ]
    found = summarise({"base": failed, "tuned": failed}, resamples=50)
    assert "–" in printed(found)
    assert printed(found).count("[red]odd") == 3  # agents, differences, decomposition
    assert "nan" not in printed(found).lower() + markdown_table(found).lower()


def test_a_slice_that_holds_all_tasks_is_not_shown_beside_them() -> None:
    records = [
        EpisodeRecord(f"t{i}", "all", "submitted", 0.5, turns=2, action_tokens=9, seconds=1, calls=2, malformed_calls=0)
        for i in range(3)
    ]
    found = summarise({"base": records, "tuned": records}, resamples=50)
    assert markdown_table(found).count("all tasks") == 2  # agents, differences
    assert "| all" not in markdown_table(found).replace("all tasks", "") and list(found["agents"]["base"]["slices"])


def test_tables_of_a_single_agent_have_no_differences() -> None:
    text = printed(summarise({"base": episodes(0.4, 12)}, resamples=50))
    assert "paired differences" not in text


def test_markdown_rows_all_have_the_columns_of_their_header(summary: dict[str, Any]) -> None:
    for block in markdown_table(summary).strip().split("\n\n"):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| all tasks (40) | base |" in markdown_table(summary)


def test_a_slice_may_be_called_anything(tmp_path: Path) -> None:
    named = {
        name: [replace(episode, slice="a|b $x_{" if episode.slice == "bridge" else "c") for episode in played]
        for name, played in {"base": episodes(0.4, 12), "tuned": episodes(0.7, 1)}.items()
    }
    found = summarise(named, resamples=50)
    assert r"| a\|b $x {" in markdown_table(found)
    save_png(agent_bars(found), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)


def test_learning_curves_draw_the_panels_that_have_values() -> None:
    rows: list[dict[str, Any]] = [
        {"step": t, "reward": 0.1 * t, "entropy": None, "failure_rate": 0.2} for t in range(40)
    ]
    rows[10]["val/ndcg@10"] = 0.5
    rows[3]["reward"] = float("nan")
    figure = learning_curves(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
    assert titles == ["Reward", "Ranking", "Failures"]
    reward, ranking, failures = figure.axes[:3]
    assert len(heights_of(reward.get_lines()[0])) == 39
    assert heights_of(ranking.get_lines()[0]) == pytest.approx([0.5])
    assert heights_of(failures.get_lines()[-1])[0] == pytest.approx(20.0)
    assert all(axes.get_xlabel() == "step" and axes.get_ylabel() for axes in (reward, ranking, failures))
    assert learning_curves(rows, [Panel("Mine", "unit", {"reward": "r"})]).axes[0].get_title(loc="left") == "Mine"
    with pytest.raises(ValueError, match="none of the 1 rows"):
        learning_curves([{"step": 1}])


def test_running_mean_of_a_line_is_the_line_away_from_its_ends() -> None:
    rows = [{"step": t, "turns": float(t)} for t in range(60)]
    smooth = heights_of(learning_curves(rows).axes[0].get_lines()[-1])
    assert smooth[5:55] == pytest.approx(np.arange(5, 55))


def test_bars_have_heights_and_intervals_of_the_summary(summary: dict[str, Any], tmp_path: Path) -> None:
    figure = agent_bars(summary)
    heights = sorted(bar.get_height() for bar in figure.axes[0].patches if isinstance(bar, Rectangle))
    agents = summary["agents"].values()
    expected = [a["ndcg@10"] for a in agents] + [s["ndcg@10"] for a in agents for s in a["slices"].values()]
    assert heights == pytest.approx(sorted(expected))
    assert save_png(figure, tmp_path / "deep" / "bars.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("count", [1, 5, 9])
def test_bars_leave_room_for_their_axes_beside_the_legend(count: int, tmp_path: Path) -> None:
    """One slice and several agents: the legend used to be wider than the figure, and no room was left for the bars."""
    names = ["base", "tuned", "bm25", "vector", "fusion", "other", "another", "a third", "a fourth"][:count]
    found = summarise({name: [replace(e, slice="all") for e in episodes(0.5, 0)] for name in names}, resamples=50)
    figure = agent_bars(found)
    save_png(figure, tmp_path / "bars.png")
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert axes.get_position().width > 0.6
    assert legend.get_window_extent().x0 > 0
    assert legend.get_window_extent().x1 < figure.bbox.x1


def test_report_is_one_well_formed_file_without_outside_references(summary: dict[str, Any], tmp_path: Path) -> None:
    drawn = save_png(agent_bars(summary), tmp_path / "bars.png")
    path = write_report(
        tmp_path / "run" / "report.html",
        {"temperature 1": summary, "greedy": summary},
        {"Agents": drawn, "Curves": learning_curves([{"step": 1, "reward": 0.5}])},
        [trajectory(), trajectory(agent="base", status="tool_failure", reward=None, ranking=[])],
        {"seed": 0},
    )
    page = path.read_text(encoding="utf-8")
    found = Tags(page)
    assert found.open == []
    assert found.tags.count("img") == 2
    assert "script" not in found.tags
    links = [value or "" for name, value in found.attributes if name in ("src", "href")]
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert found.tags.count("article") == 1  # both agents' episodes of the one task
    assert "no reward" in page
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_report_escapes_every_text_that_it_is_given(summary: dict[str, Any], tmp_path: Path) -> None:
    evil = '" onerror="alert(0)" <script>alert(1)</script><img src=x onerror=alert(2)>\'&'
    hostile = trajectory(
        task_id=evil,
        slice=evil,
        question=evil,
        agent=evil,
        status=evil,
        turns=[{"action": evil, "observation": evil + " numpy.polyfit"}],
        ranking=[{"title": evil, "grade": 1}],
        relevant=[{"title": evil, "grade": 2}, {"title": "<b>", "grade": 0}],
    )
    path = write_report(tmp_path / "r.html", {evil: summary}, {evil: Figure()}, [hostile], {evil: evil}, title=evil)
    found = Tags(path.read_text(encoding="utf-8"))
    assert found.open == []
    assert "script" not in found.tags
    assert "b" not in found.tags[found.tags.index("article") :][:3]
    assert found.tags.count("img") == 1
    assert "onerror" not in dict(found.attributes)


def test_report_marks_relevant_titles_and_only_whole_ones(tmp_path: Path) -> None:
    page = write_report(tmp_path / "r.html", {}, {}, [trajectory()], {}).read_text(encoding="utf-8")
    assert '[1] <mark title="grade 1">numpy.polyfit</mark>. See numpy.polyfit2, my.numpy.polyfit' in page
    assert "<li><mark>numpy.polyval</mark> <small>grade 2</small></li><li>numpy.svd</li>" in page


def test_report_survives_a_lone_surrogate_and_names_a_missing_key(tmp_path: Path) -> None:
    odd = trajectory(turns=[{"action": "\ud800", "observation": None}])
    assert "\\ud800" in write_report(tmp_path / "r.html", {}, {}, [odd], {}).read_text(encoding="utf-8")
    incomplete = trajectory()
    del incomplete["reward"]
    with pytest.raises(ValueError, match=r"trajectory 0 lacks \['reward'\]"):
        write_report(tmp_path / "r.html", {}, {}, [incomplete], {})
