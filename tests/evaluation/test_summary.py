"""The summary of per-task records: values by hand, agreement with the stats functions, faults of the input."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from searchrl_jax.evaluation import stats
from searchrl_jax.evaluation.summary import FAILURES, METRICS, EpisodeRecord, summarise

SLICES = ("known_item", "bridge", "pointed_bridge")


def episodes(tasks: int, seed: int, failures: float = 0.0, one_shot: bool = False) -> list[EpisodeRecord]:
    rng = np.random.default_rng(seed)
    records = []
    for i in range(tasks):
        status = None if one_shot else str(rng.choice(FAILURES[:2])) if rng.random() < failures else "submitted"
        malformed = 0 if one_shot else int(rng.random() < 0.2)
        records.append(
            EpisodeRecord(
                task_id=f"task-{i}",
                slice=SLICES[i % 3],
                status=status,
                ndcg=float(rng.uniform(0, 1)) if status in (None, "submitted") else 0.0,
                turns=1 if one_shot else int(rng.integers(2, 7)),
                action_tokens=0 if one_shot else int(rng.integers(30, 200)),
                seconds=float(rng.uniform(0.1, 1.0)),
                calls=1 if one_shot else 3 + malformed,
                malformed_calls=malformed,
            )
        )
    return records


def all_agents(tasks: int) -> dict[str, list[EpisodeRecord]]:
    return {
        "base": episodes(tasks, 0, failures=0.3),
        "tuned": episodes(tasks, 1, failures=0.05),
        "bm25": episodes(tasks, 2, one_shot=True),
        "vector": episodes(tasks, 3, one_shot=True),
        "fusion": episodes(tasks, 4, one_shot=True),
    }


def test_metrics_by_hand() -> None:
    records = [
        EpisodeRecord(
            "a", "bridge", "submitted", 0.8, turns=3, action_tokens=60, seconds=1.0, calls=3, malformed_calls=1
        ),
        EpisodeRecord(
            "b", "bridge", "submitted", 0.4, turns=2, action_tokens=40, seconds=2.0, calls=2, malformed_calls=0
        ),
        # A score on a failed task must not count.
        EpisodeRecord(
            "c", "bridge", "turn_limit", 0.9, turns=6, action_tokens=90, seconds=3.0, calls=6, malformed_calls=1
        ),
        EpisodeRecord(
            "d", "known_item", "tool_failure", 0.0, turns=1, action_tokens=10, seconds=6.0, calls=1, malformed_calls=0
        ),
    ]
    base = summarise({"base": records}, resamples=100)["agents"]["base"]
    assert base["tasks"] == 4
    assert base["ndcg@10"] == pytest.approx(0.3)
    assert base["ndcg@10_completed"] == pytest.approx(0.6)
    assert base["failure_rate"] == 0.5
    assert base["failures_by_status"] == {
        "turn_limit": 0.25,
        "token_limit": 0,
        "context_limit": 0,
        "tool_failure": 0.25,
    }
    assert base["malformed_rate"] == pytest.approx(2 / 12)
    assert (base["turns"], base["action_tokens"], base["seconds"]) == (3.0, 50.0, 3.0)
    assert base["slices"]["bridge"]["ndcg@10"] == pytest.approx(0.4)
    assert base["slices"]["bridge"]["tasks"] == 3
    nothing = base["slices"]["known_item"]
    assert (nothing["ndcg@10"], nothing["ndcg@10_completed"]) == (0.0, None)
    assert nothing["intervals"]["ndcg@10_completed"] == [None, None]
    assert set(nothing) == set(base) - {"slices"}


def test_has_every_agent_pair_and_slice_and_is_json() -> None:
    found = summarise(all_agents(60), resamples=200)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found["agents"]) == ["base", "tuned", "bm25", "vector", "fusion"]
    assert list(found["differences"]) == ["tuned-base", "tuned-bm25", "tuned-vector", "tuned-fusion"]
    for entry in found["agents"].values():
        assert set(entry["slices"]) == set(SLICES)
        for metric in METRICS:
            low, high = entry["intervals"][metric]
            assert low <= entry[metric] <= high
        assert sum(entry["failures_by_status"].values()) == pytest.approx(entry["failure_rate"])
    for difference in found["differences"].values():
        for part in (difference, *difference["slices"].values()):
            assert {*METRICS, "ndcg@10_both_completed", "decomposition"} <= set(part)
    assert found["agents"]["bm25"]["failure_rate"] == 0.0


def test_agrees_with_the_functions_of_stats() -> None:
    agents = all_agents(90)
    found = summarise(agents, resamples=500, seed=3)
    base, tuned = agents["base"], agents["tuned"]
    b, t = (np.array([r.ndcg if r.is_completed else 0.0 for r in rs]) for rs in (base, tuned))
    b_done, t_done = (np.array([r.is_completed for r in rs]) for rs in (base, tuned))
    interval = stats.bootstrap_interval(t, resamples=500, seed=3)
    assert found["agents"]["tuned"]["intervals"]["ndcg@10"] == pytest.approx([interval.low, interval.high])

    def check(entry: dict[str, float], expected: stats.Difference) -> None:
        got = (entry["value"], entry["low"], entry["high"], entry["p"])
        assert got == pytest.approx((expected.value, expected.low, expected.high, expected.p))

    difference = found["differences"]["tuned-base"]
    check(difference["ndcg@10"], stats.paired_test(t, b, resamples=500, seed=3))
    given = stats.paired_ratio_test((t, t_done), (b, b_done), resamples=500, seed=3)
    check(difference["ndcg@10_completed"], given)
    check(difference["failure_rate"], stats.paired_test(~t_done, ~b_done, resamples=500, seed=3))
    both = b_done & t_done
    assert difference["ndcg@10_both_completed"]["value"] == pytest.approx((t - b)[both].mean())
    assert difference["ndcg@10_both_completed"]["tasks"] == both.sum()
    conditional = stats.paired_test(t[both], b[both], resamples=500, seed=3)
    assert difference["ndcg@10_both_completed"]["p"] == pytest.approx(conditional.p, abs=0.05)
    assert difference["ndcg@10_both_completed"]["low"] == pytest.approx(conditional.low, abs=0.03)
    split = stats.decompose((b, b_done), (t, t_done), resamples=500, seed=3)
    parts = difference["decomposition"]
    assert parts["ranking"]["value"] == split.ranking
    assert parts["failure_avoidance"]["value"] + parts["ranking"]["value"] == parts["total"]["value"]
    assert (parts["ranking"]["low"], parts["ranking"]["high"]) == pytest.approx(split.intervals["ranking"])
    bridge = np.array([r.slice == "bridge" for r in base])
    check(difference["slices"]["bridge"]["ndcg@10"], stats.paired_test(t[bridge], b[bridge], resamples=500, seed=3))


def test_order_of_records_does_not_matter() -> None:
    agents = all_agents(30)
    shuffled = {**agents, "tuned": agents["tuned"][::-1]}
    assert summarise(shuffled, resamples=100) == summarise(agents, resamples=100)


def test_five_agents_on_450_tasks_take_under_five_seconds() -> None:
    agents = all_agents(450)
    start = time.perf_counter()
    summarise(agents)
    assert time.perf_counter() - start < 5.0


def test_bad_records_are_refused() -> None:
    records = episodes(6, 0)
    with pytest.raises(ValueError, match="one record per task"):
        summarise({"base": [*records, records[0]]})
    with pytest.raises(ValueError, match="differ in 1 tasks, such as 'task-5'"):
        summarise({"base": records, "tuned": records[:5]})
    with pytest.raises(ValueError, match="different slices"):
        summarise({"base": records, "tuned": [replace(records[0], slice="bridge"), *records[1:]]})
    with pytest.raises(ValueError, match="no agents"):
        summarise({})
    with pytest.raises(ValueError, match="has no records"):
        summarise({"base": []})
    with pytest.raises(ValueError, match="got 'crashed'"):
        replace(records[0], status="crashed")
    with pytest.raises(ValueError, match="a reward of -1 is not an nDCG"):
        replace(records[0], ndcg=-1.0)
    with pytest.raises(ValueError, match="must lie in"):
        replace(records[0], ndcg=math.nan)
    with pytest.raises(ValueError, match="counts every attempt"):
        replace(records[0], calls=0, malformed_calls=1)
