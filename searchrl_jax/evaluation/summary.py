"""From what each agent did on each task to the comparison that `evaluation/final.json` holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from searchrl_jax.env.rewards import STATUSES, SUBMITTED
from searchrl_jax.evaluation import stats
from searchrl_jax.evaluation.stats import Floats

FAILURES = tuple(status for status in STATUSES if status != SUBMITTED)
METRICS = (
    "ndcg@10",
    "ndcg@10_completed",
    "failure_rate",
    "malformed_rate",
    "turns",
    "action_tokens",
    "seconds",
)
TUNED = "tuned"

# The column whose numerator is the nDCG of completed tasks, 0 elsewhere, and whose denominator says which those are.
_DONE = METRICS.index("ndcg@10_completed")


@dataclass(frozen=True)
class EpisodeRecord:
    """What one agent did on one task.

    Attributes:
        task_id: the task; every agent has exactly one record of each.
        slice: the kind of task, such as "bridge".
        status: how the episode ended, "submitted" or one of `FAILURES`; None for a one-shot retriever, which always
            completes.
        ndcg: nDCG@10 of the submitted ranking. Counted as 0 where the episode failed, whatever stands here.
        turns: turns that the policy took.
        action_tokens: tokens that the policy sampled.
        seconds: wall-clock time of the episode.
        calls: tool calls attempted, malformed ones included; a one-shot retriever makes one per tool it asks.
        malformed_calls: of these, the calls that the parser refused.
    """

    task_id: str
    slice: str
    status: str | None
    ndcg: float
    turns: float
    action_tokens: float
    seconds: float
    calls: int
    malformed_calls: int

    def __post_init__(self) -> None:
        if self.status is not None and self.status not in STATUSES:
            raise ValueError(f"task {self.task_id!r}: status must be None or one of {STATUSES}, got {self.status!r}")
        if self.is_completed and not 0 <= self.ndcg <= 1 + 1e-9:
            advice = "a reward of -1 is not an nDCG"
            raise ValueError(f"task {self.task_id!r}: ndcg must lie in [0, 1], got {self.ndcg}; {advice}")
        if not 0 <= self.malformed_calls <= self.calls:
            counts = f"{self.malformed_calls} malformed of {self.calls} calls"
            raise ValueError(f"task {self.task_id!r}: {counts}; `calls` counts every attempt")

    @property
    def is_completed(self) -> bool:
        """True where a ranking was submitted, or none had to be."""
        return self.status is None or self.status == SUBMITTED


def summarise(
    records_by_agent: Mapping[str, Sequence[EpisodeRecord]],
    *,
    confidence: float = stats.CONFIDENCE,
    resamples: int = stats.RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Every metric of every agent with its interval, over all tasks and per slice, and what sets the tuned agent apart.

        ndcg@10            mean over all tasks, a failed one counting 0
        ndcg@10_completed  mean over the tasks that the agent completed
        failure_rate       share of tasks that ended in a status of `FAILURES`; `failures_by_status` splits it
        malformed_rate     malformed calls / calls, over all tasks together
        turns, action_tokens, seconds    means over all tasks, failed ones included

    Returns:
        A JSON-ready dict::

            {"agents": {agent: {"tasks", **metrics, "failures_by_status": {status: rate},
                                "intervals": {metric: [low, high], "failures_by_status": {status: [low, high]}},
                                "slices": {slice: the same keys but "slices"}}},
             "differences": {"tuned-" + agent: {
                 **{metric: {"value", "low", "high", "p"}},
                 "ndcg@10_both_completed": {"value", "low", "high", "p", "tasks"},
                 "decomposition": {part: {"value", "low", "high"}, "tasks": {...}},
                 "slices": {slice: the same keys but "slices"}}}}

        What has no value (nDCG given completion where nothing was completed, malformed_rate without calls) is None.
        "differences" is empty where no agent is named "tuned".

    Raises:
        ValueError: no agents or no records, a task recorded twice, or agents that differ in their tasks or slices.
    """
    ordered = _aligned(records_by_agent)
    slices = [record.slice for record in next(iter(ordered.values()))]
    agents, differences = _compare(ordered, confidence, resamples, seed)
    for name in agents:
        agents[name]["slices"] = {}
    for pair in differences:
        differences[pair]["slices"] = {}
    for part in dict.fromkeys(slices):
        chosen = {name: [record for record in records if record.slice == part] for name, records in ordered.items()}
        part_agents, part_differences = _compare(chosen, confidence, resamples, seed)
        for name, entry in part_agents.items():
            agents[name]["slices"][part] = entry
        for pair, entry in part_differences.items():
            differences[pair]["slices"][part] = entry
    return {"agents": agents, "differences": differences}


def _aligned(records_by_agent: Mapping[str, Sequence[EpisodeRecord]]) -> dict[str, list[EpisodeRecord]]:
    """Every agent's records in one order of tasks."""
    if not records_by_agent:
        raise ValueError("no agents to summarise")
    first = next(iter(records_by_agent))
    expected = {record.task_id: record.slice for record in records_by_agent[first]}
    if not expected:
        raise ValueError(f"agent {first!r} has no records")
    ordered = {}
    for name, records in records_by_agent.items():
        by_task = {record.task_id: record for record in records}
        if len(by_task) != len(records):
            counts = f"{len(records)} records of {len(by_task)} tasks"
            raise ValueError(f"agent {name!r}: {counts}; expected one record per task")
        if odd := sorted(expected.keys() ^ by_task.keys()):
            differing = f"differ in {len(odd)} tasks, such as {odd[0]!r}"
            raise ValueError(f"agents {first!r} and {name!r} {differing}; run both on the same tasks to pair them")
        if moved := [task_id for task_id, record in by_task.items() if record.slice != expected[task_id]]:
            raise ValueError(f"agents {first!r} and {name!r} put task {moved[0]!r} into different slices")
        ordered[name] = [by_task[task_id] for task_id in expected]
    return ordered


def _compare(
    records_by_agent: Mapping[str, list[EpisodeRecord]], confidence: float, resamples: int, seed: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Agents and differences over one set of tasks; all intervals come from one set of resamples."""
    names = list(records_by_agent)
    others = [name for name in names if name != TUNED] if TUNED in names else []
    arrays = {name: _ratio_columns(records) for name, records in records_by_agent.items()}
    splits = {name: _paired_columns(arrays[name], arrays[TUNED]) for name in others}

    blocks = [block for name in names for block in arrays[name]] + [block for name in others for block in splits[name]]
    sums = stats.resampled_sums(np.concatenate(blocks, axis=1), resamples=resamples, seed=seed)
    resampled = iter(np.split(sums, np.cumsum([block.shape[1] for block in blocks])[:-1], axis=1))

    samples = {name: stats.ratio(next(resampled), next(resampled)) for name in names}
    agents = {name: _agent_entry(arrays[name], samples[name], confidence) for name in names}
    differences: dict[str, dict[str, Any]] = {}
    for name in others:
        both_sums, part_sums = next(resampled), next(resampled)
        both, parts = splits[name]
        value = np.append(_values(arrays[TUNED]) - _values(arrays[name]), _ratio_of_sums(both))
        sampled = (samples[TUNED] - samples[name])[:, : len(METRICS)]
        sampled = np.concatenate([sampled, stats.ratio(both_sums[:, :1], both_sums[:, 1:])], axis=1)
        p = stats.permutation_p(value, _permuted(arrays[TUNED], arrays[name], both, resamples, seed))
        keys = (*METRICS, "ndcg@10_both_completed")
        entry: dict[str, Any] = {}
        for key, v, (low, high), q in zip(keys, value, stats.percentile_bounds(sampled, confidence), p, strict=True):
            entry[key] = {"value": _json(v), "low": _json(low), "high": _json(high), "p": _json(q)}
        entry["ndcg@10_both_completed"]["tasks"] = int(both[:, 1].sum())
        bounds = stats.percentile_bounds(part_sums / len(parts), confidence)
        split = stats.decomposition_of(parts, arrays[name][1][:, _DONE], arrays[TUNED][1][:, _DONE], bounds)
        entry["decomposition"] = _decomposition_entry(split)
        differences[f"{TUNED}-{name}"] = entry
    return agents, differences


def _ratio_columns(records: Sequence[EpisodeRecord]) -> tuple[Floats, Floats]:
    """Numerators and denominators, [tasks, metrics + statuses] each: a metric is the ratio of its columns' sums."""
    done = np.array([float(record.is_completed) for record in records])
    one = np.ones_like(done)
    ndcg = np.array([record.ndcg if record.is_completed else 0.0 for record in records])
    numbers = [(r.malformed_calls, r.calls, r.turns, r.action_tokens, r.seconds) for r in records]
    malformed, calls, turns, tokens, seconds = np.array(numbers, dtype=np.float64).T
    by_status = [np.array([float(record.status == status) for record in records]) for status in FAILURES]
    numerator = np.stack([ndcg, ndcg, one - done, malformed, turns, tokens, seconds, *by_status], axis=1)
    denominator = np.stack([one, done, one, calls, one, one, one, *[one for _ in FAILURES]], axis=1)
    return numerator, denominator


def _paired_columns(base: tuple[Floats, Floats], tuned: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Columns of the difference over tasks that both completed (numerator, denominator), and of the decomposition."""
    before, after = (base[0][:, _DONE], base[1][:, _DONE]), (tuned[0][:, _DONE], tuned[1][:, _DONE])
    is_both = before[1] * after[1]
    return np.stack([(after[0] - before[0]) * is_both, is_both], axis=1), stats.decomposition_columns(before, after)


def _permuted(
    tuned: tuple[Floats, Floats], other: tuple[Floats, Floats], both: Floats, resamples: int, seed: int
) -> Floats:
    """Differences of every metric, and over tasks that both completed, after swapping the agents within tasks."""
    count = len(METRICS)
    x = np.concatenate([tuned[0][:, :count], tuned[1][:, :count], both[:, :1]], axis=1)
    # The difference over tasks that both completed is tuned - base: swapping the two agents turns its sign.
    y = np.concatenate([other[0][:, :count], other[1][:, :count], -both[:, :1]], axis=1)
    sums_x, sums_y = stats.swapped_sums(x, y, resamples=resamples, seed=seed)
    metrics = stats.ratio(sums_x[:, :count], sums_x[:, count:-1]) - stats.ratio(sums_y[:, :count], sums_y[:, count:-1])
    return np.concatenate([metrics, stats.ratio(sums_x[:, -1:], np.full((resamples, 1), both[:, 1].sum()))], axis=1)


def _values(arrays: tuple[Floats, Floats]) -> Floats:
    """The value of each of `METRICS`."""
    numerator, denominator = arrays
    return stats.ratio(numerator.sum(axis=0), denominator.sum(axis=0))[: len(METRICS)]


def _ratio_of_sums(both: Floats) -> Floats:
    numerator, denominator = both.sum(axis=0)
    return stats.ratio(np.array([numerator]), np.array([denominator]))


def _agent_entry(arrays: tuple[Floats, Floats], samples: Floats, confidence: float) -> dict[str, Any]:
    count = len(METRICS)
    bounds = [[_json(low), _json(high)] for low, high in stats.percentile_bounds(samples, confidence)]
    rates = arrays[0][:, count:].mean(axis=0)
    intervals: dict[str, Any] = dict(zip(METRICS, bounds[:count], strict=True))
    intervals["failures_by_status"] = dict(zip(FAILURES, bounds[count:], strict=True))
    return {
        "tasks": len(arrays[0]),
        **{metric: _json(value) for metric, value in zip(METRICS, _values(arrays), strict=True)},
        "failures_by_status": {status: float(rate) for status, rate in zip(FAILURES, rates, strict=True)},
        "intervals": intervals,
    }


def _decomposition_entry(split: stats.Decomposition) -> dict[str, Any]:
    values = (split.total, split.failure_avoidance, split.ranking, split.newly_completed, split.newly_failed)
    entry: dict[str, Any] = {}
    for part, value in zip(stats.PARTS, values, strict=True):
        low, high = split.intervals[part]
        entry[part] = {"value": value, "low": low, "high": high}
    return {**entry, "tasks": dict(split.tasks)}


def _json(value: float) -> float | None:
    """The number, or None for NaN: JSON has no NaN, and what has no value must not read as 0."""
    return None if math.isnan(value) else float(value)
