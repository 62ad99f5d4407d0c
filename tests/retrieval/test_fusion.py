"""Reciprocal rank fusion: hand-computed sums, order, and what is refused."""

import itertools
from typing import Any

import pytest

from searchrl_jax.retrieval import Hit, reciprocal_rank_fusion


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    assert reciprocal_rank_fusion([["a", "b", "c"], ["c", "d"]]) == [
        Hit("c", 1 / 63 + 1 / 61),
        Hit("a", 1 / 61),
        Hit("b", 1 / 62),
        Hit("d", 1 / 62),
    ]


def test_k_and_depth() -> None:
    assert reciprocal_rank_fusion([["a", "b"], ["b", "a", "c"]], k=0, depth=2) == [Hit("a", 1.5), Hit("b", 1.5)]


def test_hits_and_ids_give_the_same() -> None:
    hits = [Hit("a", 3.0), Hit("b", 1.0)]
    assert reciprocal_rank_fusion([hits, ["b"]]) == reciprocal_rank_fusion([["a", "b"], ["b"]])


def test_the_order_of_rankings_does_not_matter() -> None:
    rankings = [[f"d{(i * step) % 11}" for i in range(11)] for step in (1, 2, 3, 5)]
    fused = reciprocal_rank_fusion(rankings)
    assert all(reciprocal_rank_fusion(order) == fused for order in itertools.permutations(rankings))


def test_nothing_fuses_to_nothing() -> None:
    assert reciprocal_rank_fusion([]) == []
    assert reciprocal_rank_fusion([[], []]) == []


@pytest.mark.parametrize(
    ("rankings", "options", "message"),
    [
        ([["a", "b", "a"]], {}, "'a' twice"),
        (["abc"], {}, "sequence of ids"),
        ([[1, 2]], {}, "expected an id"),
        ([["a"]], {"k": -1}, "at least 0"),
        ([["a"]], {"depth": 0}, "at least 1"),
    ],
)
def test_bad_input_is_refused(rankings: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reciprocal_rank_fusion(rankings, **options)
