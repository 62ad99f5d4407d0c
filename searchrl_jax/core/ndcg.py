"""Normalised discounted cumulative gain, by trec_eval's definition.

It stands below both `env` (where it is the reward) and `evaluation` (where it is the result), so that a policy is
scored by the very arithmetic that it was trained on.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

Gain = Literal["linear", "exponential"]


def without_repeats(ranked_ids: Iterable[str], k: int | None = None) -> list[str]:
    """The ranking with each id at its first place only, cut after k distinct ids.

    A repeat doesn't take up a rank: later ids move up. (Counting a repeated id twice let nDCG reach 1.63.)

    Args:
        ranked_ids: document ids, best first.
        k: number of distinct ids to keep; None keeps all.

    Raises:
        ValueError: `ranked_ids` is one string (its characters would be scored as ids), or k is below 1.
    """
    if isinstance(ranked_ids, str):
        raise ValueError(
            f"expected document ids in a sequence, got the string {ranked_ids!r}; wrap a single id in a list"
        )
    if k is not None and k < 1:
        raise ValueError(f"the cut-off k must be at least 1, got {k}")
    return list(dict.fromkeys(ranked_ids))[:k]


def gain_of(grade: float, gain: Gain = "linear") -> float:
    """What a document of this grade is worth at rank 1: `grade`, or `2**grade - 1`; 0 for grades of 0 or less.

    Raises:
        ValueError: the grade is not finite, or `gain` is neither "linear" nor "exponential".
    """
    if gain not in ("linear", "exponential"):
        raise ValueError(f'gain must be "linear" (trec_eval) or "exponential" (2**grade - 1), got {gain!r}')
    if not math.isfinite(grade):
        raise ValueError(f"a relevance grade must be a finite number, got {grade!r}; correct the judgement or drop it")
    if grade <= 0:
        return 0.0
    return float(grade) if gain == "linear" else 2.0**grade - 1.0


def discounted_sum(gains: Iterable[float]) -> float:
    """sum_i gains[i] / log2(i + 1), ranks i counted from 1."""
    return sum(value / math.log2(rank + 1) for rank, value in enumerate(gains, start=1))


def ndcg_at_k(ranked_ids: Iterable[str], relevance: Mapping[str, float], k: int = 10, gain: Gain = "linear") -> float:
    """Normalised discounted cumulative gain of a ranking's first k documents, in [0, 1].

        DCG@k  = sum_{i <= k} gain(grade of the document at rank i) / log2(i + 1)
        nDCG@k = DCG@k / (DCG@k of all judged documents in descending order of grade)

    The ideal is taken over *all* judged documents, retrieved or not. Repeated ids count once and don't take up a rank;
    unjudged documents and grades of 0 or less gain nothing. The order of `ranked_ids` is what counts: there are no
    scores here, hence no ties.

    Args:
        ranked_ids: document ids, best first; may be empty or shorter than k.
        relevance: grade of each judged document.
        k: cut-off, at least 1.
        gain: "linear" (the grade itself, trec_eval's `ndcg_cut`) or "exponential" (2**grade - 1).

    Returns:
        nDCG@k; 0 where no judged document is relevant, as in trec_eval. A mean should leave such a query out.

    Raises:
        ValueError: k below 1, an unknown gain, a grade that is not finite, or a string in place of a list of ids.

    Source:
        Jarvelin & Kekalainen 2002, with the discount and the linear gain of trec_eval 9's m_ndcg_cut.c.
    """
    kept = without_repeats(ranked_ids, k)
    gains = {doc_id: gain_of(grade, gain) for doc_id, grade in relevance.items()}
    ideal = discounted_sum(sorted(gains.values(), reverse=True)[:k])
    if ideal == 0:
        return 0.0
    return discounted_sum(gains.get(doc_id, 0.0) for doc_id in kept) / ideal
