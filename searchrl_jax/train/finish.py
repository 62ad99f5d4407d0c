"""The end of a run: base, tuned agent and one-shot retrievers on the test tasks, the table and the report."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from searchrl_jax.config.overlays import to_json
from searchrl_jax.config.schema import Experiment
from searchrl_jax.data.collection import spread
from searchrl_jax.data.schema import Task
from searchrl_jax.evaluation.agents import one_shot_records, play_tasks, record_of
from searchrl_jax.evaluation.figures import agent_bars, learning_curves, save_png
from searchrl_jax.evaluation.report import write_report
from searchrl_jax.evaluation.study import episodes_path, summary_path
from searchrl_jax.evaluation.summary import EpisodeRecord, summarise
from searchrl_jax.evaluation.tables import markdown_table, print_summary
from searchrl_jax.models.decoder import Params
from searchrl_jax.rollout.collect import Player
from searchrl_jax.rollout.engine import Sampling
from searchrl_jax.train.progress import duration
from searchrl_jax.train.tracker import read_rows
from searchrl_jax.train.workspace import Workspace

SHOWN_TASKS_PER_SLICE = 4


def compare_and_report(
    experiment: Experiment,
    workdir: Path,
    work: Workspace,
    player: Player,
    agents: Mapping[str, Params],
    seconds: dict[str, float],
    *,
    check_stop: Callable[[], None],
) -> dict[str, Any]:
    """Plays every test task with each agent at each temperature, and writes `evaluation/`, `figures/`, `report.html`.

    What an earlier process played is read back. The first temperature's summary is `final.json`, and is returned.

    Args:
        seconds: of the phases before this one; the evaluation's and the total are added.
        check_stop: called between agents; raises to stop.
    """
    folder = workdir / "evaluation"
    folder.mkdir(exist_ok=True)
    if (workdir / "report.html").exists():
        print(f"the run in {workdir} is finished; its results again (another --workdir begins a new run)", flush=True)
    tasks = spread(work.tasks["test"], experiment.evaluation.tasks)
    one_shot = one_shot_records(work.retrievers, tasks)
    seconds["evaluation"] = 0.0
    records: dict[str, dict[str, Sequence[EpisodeRecord]]] = {}
    episodes: dict[str, Sequence[Mapping[str, Any]]] = {}
    for index, temperature in enumerate(experiment.evaluation.temperatures):
        records[_heading(temperature)] = {}
        for name, params in agents.items():
            path = episodes_path(folder, name, temperature)
            if not path.exists():
                _play_to_file(path, player, params, tasks, temperature, name)
            played = json.loads(path.read_text())
            seconds["evaluation"] += played["seconds"]
            records[_heading(temperature)][name] = [EpisodeRecord(**record) for record in played["records"]]
            if index == 0:
                episodes[name] = played["episodes"]
            check_stop()
    seconds["total"] = sum(seconds[phase] for phase in ("setup", "warmup", "rl", "evaluation"))
    summaries = {}
    by_temperature = zip(experiment.evaluation.temperatures, records.values(), strict=True)
    for index, (temperature, by_agent) in enumerate(by_temperature):
        summary = summarise(
            by_agent | one_shot, resamples=experiment.evaluation.bootstrap_samples, seed=experiment.seed
        ) | {"temperature": temperature, "seconds": seconds}
        summaries[_heading(temperature)] = summary
        _write_json(summary_path(folder, temperature if index else None), summary)
    _draw(experiment, workdir, work, tasks, summaries, episodes)
    markdown = [f"## {heading}\n\n{markdown_table(summary)}" for heading, summary in summaries.items()]
    (folder / "tables.md").write_text("\n".join(markdown), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 120)
    for heading, summary in summaries.items():
        print_summary(summary, title=f"{len(tasks)} test tasks, {heading}", console=console)
    phases = ", ".join(f"{phase} {duration(spent)}" for phase, spent in seconds.items())
    print(f"time: {phases}\nreport: {workdir / 'report.html'}", flush=True)
    return next(iter(summaries.values()))


def _heading(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy decoding"


def _play_to_file(
    path: Path, player: Player, params: Params, tasks: Sequence[Task], temperature: float, name: str
) -> None:
    print(f"evaluating the {name} agent on {len(tasks)} test tasks, {_heading(temperature)}", flush=True)
    began = time.perf_counter()
    played = play_tasks(player, params, tasks, Sampling(temperature), policy_version=0)
    records = [asdict(record_of(trajectory, task)) for trajectory, task in zip(played, tasks, strict=True)]
    content = {
        "seconds": time.perf_counter() - began,
        "records": records,
        "episodes": [trajectory.to_json() for trajectory in played],
    }
    _write_json(path, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _draw(
    experiment: Experiment,
    workdir: Path,
    work: Workspace,
    tasks: Sequence[Task],
    summaries: Mapping[str, Mapping[str, Any]],
    episodes: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """The figures as PNG, and the report that embeds them."""
    primary = next(iter(summaries.values()))
    figures = {"nDCG@10 on test tasks, with 95 % intervals": agent_bars(primary)}
    rows = read_rows(workdir / "metrics.jsonl")
    if any(row["step"] for row in rows):
        figures = {"Learning curves": learning_curves(rows), **figures}
    files = {"Learning curves": "learning_curves.png"}
    for caption, figure in figures.items():
        save_png(figure, workdir / "figures" / files.get(caption, "agents.png"))
    write_report(
        workdir / "report.html",
        summaries,
        figures,
        _shown_episodes(work, tasks, episodes),
        to_json(experiment),
        title=f"{experiment.exp}, scale {experiment.scale}: base and tuned agent",
    )


def _shown_episodes(
    work: Workspace, tasks: Sequence[Task], episodes: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A few test tasks of each slice, evenly spaced (neighbours are alike), as every agent played them."""
    titles = {document.doc_id: document.title or document.doc_id for document in work.documents}
    by_slice: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        by_slice.setdefault(str(task.metadata.get("slice", "all")), []).append(index)
    shown: list[dict[str, Any]] = []
    for part, members in sorted(by_slice.items()):
        count = min(len(members), SHOWN_TASKS_PER_SLICE)
        for index in (members[place * len(members) // count] for place in range(count)):
            for agent, played in episodes.items():
                heading = {"task_id": tasks[index].task_id, "slice": part, "agent": agent}
                shown.append(heading | _as_shown(tasks[index], played[index], titles))
    return shown


def _as_shown(task: Task, episode: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, Any]:
    """One episode for the report, with titles and grades in the place of ids."""
    judged = sorted(task.relevance.items(), key=lambda pair: (-pair[1], pair[0]))
    ranked = ((doc_id, task.relevance.get(doc_id)) for doc_id in episode["ranking"])
    return {
        "question": task.query,
        "status": episode["status"],
        "reward": episode["reward"],
        "turns": episode["turns"],
        "ranking": [{"title": titles[doc_id], "grade": grade} for doc_id, grade in ranked],
        "relevant": [{"title": titles[doc_id], "grade": grade} for doc_id, grade in judged if grade > 0],
    }
