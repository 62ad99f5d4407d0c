"""What a person reads while a run goes on."""

import time
from typing import Any

import pytest

from searchrl_jax.train.progress import Progress, duration, search_alarm, train_line

METRICS = {
    "reward": 0.25,
    "ndcg@10": 0.5,
    "failure_rate": 0.125,
    "malformed_rate": 0.01,
    "turns": 2.5,
    "entropy": 0.75,
    "tokens_per_second": 12345.6,
    "timing_s/step": 3.21,
}


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 s"), (42.4, "42 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (86400, "24.0 h")],
)
def test_duration_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_goes_by_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(10)
    assert progress.left(0) == "unknown"
    now += 20
    assert progress.left(4) == "30 s"
    assert progress.left(10) == "0 s"


def test_a_step_is_one_line_with_all_that_the_issue_names() -> None:
    line = train_line(7, 50, METRICS, "9 min")
    assert "\n" not in line
    parts = ("step 7/50", "reward 0.250", "nDCG@10 0.500", "failed 12.5%", "malformed 1.0%", "turns 2.50", "left 9 min")
    for part in (*parts, "12,346 tokens/s", "entropy 0.75", "3.2 s"):
        assert part in line
    assert "(" not in line


def test_failures_are_split_by_status() -> None:
    line = train_line(7, 50, METRICS | {"failures/turn_limit": 0.1, "failures/token_limit": 0.025}, "9 min")
    assert "failed 12.5% (turn_limit 10.0%, token_limit 2.5%)" in line


def test_metrics_without_a_value_do_not_break_the_line() -> None:
    assert "reward nan" in train_line(1, 2, METRICS | {"reward": float("nan")}, "unknown")
    assert "entropy –  " in train_line(1, 2, METRICS | {"entropy": float("nan")}, "unknown")


def rows(searches: list[float], ndcg: list[float]) -> list[dict[str, Any]]:
    """Ten steps of each number, behind a validation."""
    pairs = [pair for pair in zip(searches, ndcg, strict=True) for _ in range(10)]
    return [{"step": 0}] + [{"step": i, "searches": s, "ndcg@10": n} for i, (s, n) in enumerate(pairs, start=1)]


def test_more_searches_for_nothing_are_told() -> None:  # fault 30
    alarm = search_alarm(rows([1.0, 2.0, 3.0], [0.1, 0.5, 0.5]))
    assert alarm is not None and "from 2.00 to 3.00" in alarm and "(0.500 to 0.500)" in alarm
    assert search_alarm(rows([2.0, 3.0], [0.5, 0.6])) is None, "they found more"
    assert search_alarm(rows([2.0, 2.3], [0.5, 0.4])) is None, "about as many searches"
    assert search_alarm(rows([2.0], [0.5])) is None, "too early to tell"
    without_tools = [{"step": 21, "searches": 0.0, "ndcg@10": None}]
    assert search_alarm([*rows([2.0, 3.0], [0.5, 0.5]), *without_tools]) is not None
