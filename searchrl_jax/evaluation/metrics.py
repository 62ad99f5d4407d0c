"""Ranking metrics by trec_eval's definitions, their mean over tasks, and how often one of several tries succeeds.

A ranking is a list of document ids, best first. A document is relevant where its grade is above 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from searchrl_jax.core.ndcg import Gain, ndcg_at_k, without_repeats
from searchrl_jax.data.schema import Task

__all__ = [
    "Gain",
    "TaskMean",
    "mean_over_tasks",
    "ndcg_at_k",
    "pass_at_k",
    "pass_power_k",
    "ranking_from_scores",
    "recall_at_k",
    "reciprocal_rank",
]

Metric = Callable[[Sequence[str], Mapping[str, float]], float]


def recall_at_k(ranked_ids: Iterable[str], relevance: Mapping[str, float], k: int = 10) -> float:
    """The share of all relevant documents that stand among the first k distinct ids (trec_eval's `recall_k`).

    15 relevant documents of which 10 are returned give 0.667 at k = 10: the denominator is not capped at k.

    Returns:
        A number in [0, 1]; 0 where nothing is relevant.

    Raises:
        ValueError: k below 1, or a string in place of a list of ids.
    """
    kept = without_repeats(ranked_ids, k)
    relevant = _relevant(relevance)
    return len(relevant.intersection(kept)) / len(relevant) if relevant else 0.0


def reciprocal_rank(ranked_ids: Iterable[str], relevance: Mapping[str, float], k: int | None = None) -> float:
    """1 / rank of the first relevant document; 0 where none is ranked (trec_eval's `recip_rank`, which has no cut-off).

    Args:
        ranked_ids: document ids, best first; repeats don't take up a rank.
        relevance: grade of each judged document.
        k: look no further than this rank; None looks through the whole ranking.

    Raises:
        ValueError: k below 1, or a string in place of a list of ids.
    """
    relevant = _relevant(relevance)
    ranks = enumerate(without_repeats(ranked_ids, k), start=1)
    return next((1.0 / rank for rank, doc_id in ranks if doc_id in relevant), 0.0)


def ranking_from_scores(scores: Mapping[str, float]) -> list[str]:
    """Document ids by descending score; equal scores by *descending* id, which is trec_eval's rule for ties.

    Only for a run that comes as scores. A policy's ranking is already in order, and its order is what counts.
    """
    return sorted(scores, key=lambda doc_id: (scores[doc_id], doc_id), reverse=True)


class TaskMean(float):
    """A mean over tasks, usable as the number that it is, which remembers what it was taken over.

    Attributes:
        per_task: the value of each task that counts, by task id, in the order of the tasks.
        missing: tasks that count but had no ranking, and so entered the mean with 0.
        without_relevant: tasks left out of the mean, since no judged document of theirs is relevant.
    """

    per_task: dict[str, float]
    missing: int
    without_relevant: int

    def __new__(cls, per_task: Mapping[str, float], missing: int, without_relevant: int) -> "TaskMean":
        mean = super().__new__(cls, sum(per_task.values()) / len(per_task))
        mean.per_task, mean.missing, mean.without_relevant = dict(per_task), missing, without_relevant
        return mean


def mean_over_tasks(
    runs: Mapping[str, Sequence[str]],
    tasks: Iterable[Task],
    metric: Metric = ndcg_at_k,
) -> TaskMean:
    """The mean of a metric over every task that has a relevant document.

    A task without a ranking counts as 0: leaving it out would reward an agent for not answering. (pytrec_eval leaves
    it out.) A task without a relevant document is left out, as every ranking of it would score 0, and counted.
    A task's `excluded_ids` are removed from its ranking before scoring: they neither gain nor take up a rank.

    Args:
        runs: task id -> ranking. Rankings of tasks that are not in `tasks` are not looked at, so that one set of runs
            serves every slice of the tasks.
        tasks: the tasks to average over.
        metric: (ranked_ids, relevance) -> value; for other settings pass e.g. `functools.partial(ndcg_at_k, k=20)`.

    Raises:
        ValueError: two tasks share an id, or no task has a relevant document (a mean over nothing has no value).
    """
    per_task: dict[str, float] = {}
    missing = without_relevant = 0
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise ValueError(f"task id {task.task_id!r} occurs twice; rename or drop one, or it counts double")
        seen.add(task.task_id)
        if not _relevant(task.relevance):
            without_relevant += 1
        elif task.task_id not in runs:
            missing += 1
            per_task[task.task_id] = 0.0
        else:
            ranked = [doc_id for doc_id in without_repeats(runs[task.task_id]) if doc_id not in task.excluded_ids]
            per_task[task.task_id] = metric(ranked, task.relevance)
    if not per_task:
        raise ValueError(f"none of the {len(seen)} tasks has a relevant document; there is nothing to average over")
    return TaskMean(per_task, missing, without_relevant)


def pass_at_k(tries: int, successes: int, k: int) -> float:
    """Probability that at least one of k tries, drawn without replacement from those made, is a success.

        pass@k = 1 - C(tries - successes, k) / C(tries, k)

    An unbiased estimate of the probability that k fresh tries hold a success.

    Args:
        k: in [1, tries].

    Raises:
        ValueError: k or successes don't fit the tries.

    Source:
        Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    _check_tries(tries, successes, k)
    return 1 - math.comb(tries - successes, k) / math.comb(tries, k)


def pass_power_k(tries: int, successes: int, k: int) -> float:
    """Probability that all of k tries, drawn without replacement from those made, are successes.

        pass^k = C(successes, k) / C(tries, k)

    Args:
        k: in [1, tries].

    Raises:
        ValueError: k or successes don't fit the tries.

    Source:
        tau-bench, arXiv:2406.12045, section 4.
    """
    _check_tries(tries, successes, k)
    return math.comb(successes, k) / math.comb(tries, k)


def _check_tries(tries: int, successes: int, k: int) -> None:
    if not 0 <= successes <= tries or not 1 <= k <= tries:
        raise ValueError(
            f"expected 0 <= successes <= tries and 1 <= k <= tries, got {successes} successes in {tries} tries and "
            f"k = {k}; make more tries, or ask for a smaller k"
        )


def _relevant(relevance: Mapping[str, float]) -> set[str]:
    return {doc_id for doc_id, grade in relevance.items() if grade > 0}
