"""Metrics: hand-computed values, each public fault of nDCG code, and equality with pytrec_eval."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import pytrec_eval

from searchrl_jax.core import ndcg as core_ndcg
from searchrl_jax.data.schema import Task
from searchrl_jax.evaluation.metrics import (
    TaskMean,
    mean_over_tasks,
    ndcg_at_k,
    pass_at_k,
    pass_power_k,
    ranking_from_scores,
    recall_at_k,
    reciprocal_rank,
)


def trec_eval(ranking: list[str], relevance: dict[str, int], measures: set[str]) -> dict[str, float]:
    """pytrec_eval's values for a ranked list; it sorts by score, so ranks become strictly falling scores."""
    scores = {doc_id: float(len(ranking) - rank) for rank, doc_id in enumerate(ranking)}
    return pytrec_eval.RelevanceEvaluator({"q": relevance}, measures).evaluate({"q": scores})["q"]


@pytest.mark.parametrize("seed", range(200))
def test_equal_to_pytrec_eval_on_random_rankings(seed: int) -> None:
    rng = random.Random(seed)
    pool = [f"d{i}" for i in range(40)]
    relevance = {d: rng.choice([-1, 0, 0, 1, 2, 3]) for d in rng.sample(pool, rng.randint(1, 30))}
    ranking = rng.sample(pool, rng.randint(1, 30))
    theirs = trec_eval(ranking, relevance, {"ndcg_cut.1,5,10,100", "recall.5,10", "recip_rank"})
    for k in (1, 5, 10, 100):
        assert ndcg_at_k(ranking, relevance, k) == pytest.approx(theirs[f"ndcg_cut_{k}"], abs=1e-12)
    for k in (5, 10):
        assert recall_at_k(ranking, relevance, k) == pytest.approx(theirs[f"recall_{k}"], abs=1e-12)
    assert reciprocal_rank(ranking, relevance) == pytest.approx(theirs["recip_rank"], abs=1e-12)


def test_reward_and_evaluation_share_one_implementation() -> None:
    assert ndcg_at_k is core_ndcg.ndcg_at_k


def test_fault_37_a_repeated_document_counts_once_and_takes_no_rank() -> None:
    assert ndcg_at_k(["d1", "d1"], {"d1": 1}) == 1.0
    assert ndcg_at_k(["d2", "d1", "d1"], {"d1": 1}) == pytest.approx(0.6309, abs=5e-5)
    # The repeat of x is dropped, so d1 stands second, inside the cut.
    assert ndcg_at_k(["x", "x", "d1"], {"d1": 1}, k=2) == pytest.approx(0.6309, abs=5e-5)
    assert recall_at_k(["x", "x", "d1"], {"d1": 1}, k=2) == 1.0
    assert recall_at_k(["d1", "d1"], {"d1": 1, "d2": 1}) == 0.5
    assert reciprocal_rank(["x", "x", "d1"], {"d1": 1}) == 0.5


def test_fault_38_the_ideal_is_taken_over_all_judged_documents() -> None:
    assert ndcg_at_k(["d1", "x"], {"d1": 1, "d2": 1}) == pytest.approx(0.6131, abs=5e-5)


def test_fault_39_nothing_relevant_is_zero_and_out_of_the_mean_and_a_missing_query_is_zero_in_it() -> None:
    assert ndcg_at_k(["d1"], {}) == 0.0
    assert ndcg_at_k(["d1"], {"d1": 0}) == 0.0
    assert ndcg_at_k([], {"d1": 1}) == 0.0
    assert recall_at_k(["d1"], {}) == 0.0
    assert reciprocal_rank(["d1"], {"d1": 0}) == 0.0

    found, missing, unjudged = (Task("a", "?", {"d1": 1}), Task("b", "?", {"d1": 1}), Task("c", "?", {"d1": 0}))
    mean = mean_over_tasks({"a": ["d1"], "c": ["d1"]}, [found, missing, unjudged])
    assert mean == 0.5
    assert isinstance(mean, TaskMean)
    assert mean.per_task == {"a": 1.0, "b": 0.0}
    assert (mean.missing, mean.without_relevant) == (1, 1)
    with pytest.raises(ValueError, match="none of the 1 tasks has a relevant document"):
        mean_over_tasks({"c": ["d1"]}, [unjudged])


def test_fault_40_more_relevant_documents_than_the_cut() -> None:
    relevance = {f"d{i}": 1 for i in range(15)}
    ranking = [f"d{i}" for i in range(10)]
    assert ndcg_at_k(ranking, relevance) == 1.0
    assert recall_at_k(ranking, relevance) == pytest.approx(0.667, abs=5e-4)


def test_fault_41_graded_gain_is_linear_unless_asked_and_negative_grades_count_zero() -> None:
    relevance = {"a": 3, "b": 2, "c": 1}
    assert ndcg_at_k(["c", "b", "a"], relevance) == pytest.approx(0.7900, abs=5e-5)
    assert ndcg_at_k(["c", "b", "a"], relevance, gain="exponential") == pytest.approx(0.6806, abs=5e-5)
    for gain in ("linear", "exponential"):
        assert ndcg_at_k(["bad", "a"], {"bad": -2, "a": 1}, gain=gain) == pytest.approx(0.6309, abs=5e-5)
    assert recall_at_k(["bad"], {"bad": -2, "a": 1}) == 0.0
    assert reciprocal_rank(["bad", "a"], {"bad": -2, "a": 1}) == 0.5


def test_fault_42_ties_go_by_descending_id_as_in_trec_eval_and_only_where_there_are_scores() -> None:
    tied = {"d1": 1.0, "d2": 1.0, "d3": 1.0}
    assert ndcg_at_k(ranking_from_scores(tied), {"d3": 1}) == 1.0
    assert ndcg_at_k(ranking_from_scores(tied), {"d1": 1}) == 0.5
    evaluator = pytrec_eval.RelevanceEvaluator({"q": {"d1": 1}}, {"ndcg_cut.10"})
    assert evaluator.evaluate({"q": tied})["q"]["ndcg_cut_10"] == 0.5
    assert ranking_from_scores({"a": 0.1, "b": 0.9, "c": 0.5}) == ["b", "c", "a"]
    assert ndcg_at_k(["d1", "d2", "d3"], {"d1": 1}) == 1.0


def test_excluded_documents_are_removed_before_scoring() -> None:
    task = Task("a", "?", {"d1": 1}, excluded_ids=("asked",))
    assert mean_over_tasks({"a": ["asked", "d1"]}, [task]) == 1.0
    assert mean_over_tasks({"a": ["asked", "d1"]}, [replace(task, excluded_ids=())]) == pytest.approx(0.6309, abs=5e-5)


def test_mean_takes_another_metric_and_ignores_runs_of_other_tasks() -> None:
    tasks = [Task("a", "?", {"d1": 1}), Task("b", "?", {"d2": 1})]
    runs = {"a": ["x", "d1"], "b": ["d2"], "elsewhere": ["d1"]}
    assert mean_over_tasks(runs, tasks, metric=reciprocal_rank) == 0.75
    assert mean_over_tasks(runs, tasks, metric=partial(ndcg_at_k, k=1)) == 0.5
    with pytest.raises(ValueError, match="'a' occurs twice"):
        mean_over_tasks(runs, [tasks[0], tasks[0]])


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ndcg_at_k(["d1"], {"d1": 1}, k=0)
    with pytest.raises(ValueError, match="got the string 'd1'"):
        ndcg_at_k("d1", {"d1": 1})
    with pytest.raises(ValueError, match="'log'"):
        ndcg_at_k(["d1"], {"d1": 1}, gain="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite number, got nan"):
        ndcg_at_k(["d1"], {"d1": float("nan")})
    with pytest.raises(ValueError, match="got the string"):
        reciprocal_rank("d1", {"d1": 1})


@pytest.mark.parametrize(("tries", "successes"), [(n, c) for n in range(1, 7) for c in range(n + 1)])
def test_pass_at_k_and_pass_power_k_equal_the_enumeration_of_all_draws(tries: int, successes: int) -> None:
    outcomes = [True] * successes + [False] * (tries - successes)
    for k in range(1, tries + 1):
        draws = list(itertools.combinations(outcomes, k))
        assert pass_at_k(tries, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
        assert pass_power_k(tries, successes, k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("tries", "successes", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_of_more_tries_than_were_made_is_refused(tries: int, successes: int, k: int) -> None:
    for metric in (pass_at_k, pass_power_k):
        with pytest.raises(ValueError, match=f"{successes} successes in {tries} tries and k = {k}"):
            metric(tries, successes, k)
