"""Finished runs side by side, as Markdown: what each reached, and how far above a one-shot retriever and another run.

The files of a run's `evaluation/` are named here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from searchrl_jax.evaluation.summary import EpisodeRecord, summarise
from searchrl_jax.evaluation.tables import Column, agent_name, difference_cell, markdown_rows, parts, slice_name

Summaries = Mapping[str, Mapping[str, Any]]  # name of the file -> what it holds, the first temperature first

OF_NO_INTEREST = frozenset({"workdir", "warmup.path"})  # settings that tell runs apart and change nothing in them


def summary_path(folder: Path, temperature: float | None) -> Path:
    """File of the summary of a temperature; None stands for the run's first."""
    return folder / ("final.json" if temperature is None else f"final_{_suffix(temperature)}.json")


def episodes_path(folder: Path, agent: str, temperature: float) -> Path:
    """File of what an agent did on each test task: "seconds", "records" (of `EpisodeRecord`s) and "episodes"."""
    return folder / "episodes" / f"{agent}_{_suffix(temperature)}.json"


def _suffix(temperature: float) -> str:
    """ "t1", "t05" or "greedy"."""
    return f"t{temperature:g}".replace(".", "") if temperature else "greedy"


def read_run(workdir: Path) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """The settings of a finished run, as flags name them, and its summaries.

    Raises:
        ValueError: there is no finished run in `workdir`.
    """
    final = summary_path(workdir / "evaluation", None)
    if not final.exists():
        raise ValueError(f"expected a finished run in {workdir}, found no {final}; finish it, or name another folder")
    others = sorted(final.parent.glob("final_*.json"), reverse=True)
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (final, *others)}
    return flat(json.loads((workdir / "config.json").read_text(encoding="utf-8"))), read


def read_records(workdir: Path, temperature: float, agent: str = "tuned") -> list[EpisodeRecord]:
    """What the agent did on each test task, in their order.

    Raises:
        ValueError: the run in `workdir` was not evaluated at that temperature, or was by another version.
    """
    path = episodes_path(workdir / "evaluation", agent, temperature)
    try:
        return [EpisodeRecord(**record) for record in json.loads(path.read_text(encoding="utf-8"))["records"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected the {agent} agent's episodes in {path}, got {error!r}; evaluate it anew") from error


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rl.gamma": 1.0, ...} for {"rl": {"gamma": 1.0}, ...}."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the runs, as in "seed=1, rl.loss_fn=cispo".

    The first run is called by its settings that another one hasn't, each other by its own that the first hasn't.
    """
    names = dict.fromkeys(name for config in configs for name in config if name not in OF_NO_INTEREST)
    first, found = configs[0], []
    for index, config in enumerate(configs):
        rivals = [config] if index else configs[1:]
        differing = [name for name in names if any(rival.get(name) != first.get(name) for rival in rivals)]
        found.append(", ".join(f"{name}={config.get(name)}" for name in differing) or "run")
    return found


def tables(runs: Sequence[tuple[str, Summaries]], workdirs: Sequence[Path]) -> str:
    """All tables of runs, of which `workdirs` are the directories."""
    against = against_first_table(runs, workdirs) if len(runs) > 1 else ""
    return "\n".join(filter(None, [gains_table(runs), margins_table(runs), against]))


def gains_table(runs: Sequence[tuple[str, Summaries]]) -> str:
    """The tuned agent against its base, a row for each run and temperature; brackets are 95 % intervals."""
    score, rate = Column("ndcg@10", ""), Column("failure_rate", "", 100.0, 1)
    head = ["run", "temperature", "base", "tuned", "difference", "both finished", "failed: base", "tuned", "malformed"]
    rows = [[*head, "minutes"]]
    for label, summaries in runs:
        for summary in summaries.values():
            base, tuned = summary["agents"]["base"], summary["agents"]["tuned"]
            gain = summary["differences"]["tuned-base"]
            cells = [f"{agent[score.metric]:.3f}" for agent in (base, tuned)]
            cells += [
                " ".join(difference_cell(gain[name], score)[:2]) for name in (score.metric, "ndcg@10_both_completed")
            ]
            cells += [f"{100 * agent[rate.metric]:.1f} %" for agent in (base, tuned)]
            cells += [f"{100 * tuned['malformed_rate']:.1f} %", f"{summary['seconds']['total'] / 60:.0f}"]
            rows.append([label, f"{summary['temperature']:g}", *cells])
    return markdown_rows(rows, left=1)


def margins_table(runs: Sequence[tuple[str, Summaries]], retriever: str = "bm25") -> str:
    """The tuned agent's nDCG@10, and how far it is above `retriever`, over all tasks and in each slice.

    Raises:
        ValueError: the runs were evaluated on other slices, so that one column cannot hold them.
    """
    first = next(iter(runs[0][1].values()))
    slices = list(parts(first["agents"]["tuned"]["slices"]))
    for label, summaries in runs:
        found = list(parts(next(iter(summaries.values()))["agents"]["tuned"]["slices"]))
        if found != slices:
            raise ValueError(
                f"{label}: expected the slices {slices} of the first run, got {found}; compare runs of one data set"
            )
    rows = [["run", "temperature", "all tasks", *map(slice_name, slices)]]
    one_shot = first["agents"][retriever]
    values = [one_shot["ndcg@10"], *(one_shot["slices"][name]["ndcg@10"] for name in slices)]
    rows.append([agent_name(retriever), "", *(f"{value:.3f}" for value in values)])
    for label, summaries in runs:
        for summary in summaries.values():
            tuned, above = summary["agents"]["tuned"], summary["differences"][f"tuned-{retriever}"]
            pairs = [(tuned, above), *((tuned["slices"][name], above["slices"][name]) for name in slices)]
            cells = [
                " ".join([f"{agent['ndcg@10']:.3f},", *difference_cell(gap["ndcg@10"], Column("ndcg@10", ""))[:2]])
                for agent, gap in pairs
            ]
            rows.append([label, f"{summary['temperature']:g}", *cells])
    return markdown_rows(rows, left=1)


def against_first_table(runs: Sequence[tuple[str, Summaries]], workdirs: Sequence[Path]) -> str:
    """Each run's tuned agent minus that of the first run: paired over the tasks, at each temperature that both have.

    Raises:
        ValueError: the runs were evaluated on other tasks, or the episodes of one can't be read.
    """
    score, rate = Column("ndcg@10", ""), Column("failure_rate", "", 100.0, 1)
    slices = list(parts(next(iter(runs[0][1].values()))["agents"]["tuned"]["slices"]))
    rows = [
        ["minus the first run", "temperature", "all tasks", "both finished", "failed, points", *map(slice_name, slices)]
    ]
    temperatures = {summary["temperature"] for summary in runs[0][1].values()}
    for (label, summaries), workdir in list(zip(runs, workdirs, strict=True))[1:]:
        for temperature in (each["temperature"] for each in summaries.values() if each["temperature"] in temperatures):
            pair = {"base": read_records(workdirs[0], temperature), "tuned": read_records(workdir, temperature)}
            try:
                gap = summarise(pair)["differences"]["tuned-base"]
            except ValueError as error:
                raise ValueError(
                    f"{label}: expected the tasks of the first run: {error}; compare runs of one data set"
                ) from error
            columns = [(gap, score.metric, score), (gap, "ndcg@10_both_completed", score), (gap, rate.metric, rate)]
            columns += [(gap["slices"][name], score.metric, score) for name in slices]
            cells = [" ".join(difference_cell(entry[name], column)[:2]) for entry, name, column in columns]
            rows.append([label, f"{temperature:g}", *cells])
    return markdown_rows(rows, left=1)
