"""Hits, the interface every index serves, and the one order in which hits are returned."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from searchrl_jax.retrieval.documents import Collection
from searchrl_jax.retrieval.filters import Where


@dataclass(frozen=True)
class Hit:
    """One result. Scores of one index and query compare; those of two indexes or two queries don't."""

    doc_id: str
    score: float


@runtime_checkable
class Retriever(Protocol):
    """A searchable index. Searches change nothing and may run on many threads at once."""

    def search(self, query: str, k: int = 10, where: Where | None = None) -> list[Hit]:
        """The best `k` documents that `where` admits, by (-score, doc_id); fewer only where fewer exist."""
        ...

    def search_many(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """`search` of each query, in order."""
        ...

    def save(self, path: str | Path) -> None:
        """Write the index to the folder `path`, whole or not at all; `load_index` reads it."""
        ...


def check_query(query: str, k: int) -> int:
    """`k` as a plain int, once both are found good.

    Raises:
        ValueError: `query` is no string, or `k` is no whole number of at least 1.
    """
    if not isinstance(query, str):
        raise ValueError(f"query must be a string, got {type(query).__name__}")
    try:
        depth = operator.index(k)
    except TypeError:
        depth = 0
    if isinstance(k, bool) or depth < 1:
        raise ValueError(f"k, the number of hits wanted, must be a whole number of at least 1, got {k!r}")
    return depth


def check_queries(queries: Sequence[str]) -> list[str]:
    """`queries` as a list.

    Raises:
        ValueError: a single string, which would be searched letter by letter, or an item that is no string.
    """
    if isinstance(queries, str):
        raise ValueError("queries must be a sequence of strings, got one string; call search for a single query")
    rows = list(queries)
    for row, query in enumerate(rows):
        if not isinstance(query, str):
            raise ValueError(f"query {row} must be a string, got {type(query).__name__}")
    return rows


def best_hits(
    collection: Collection, rows: Int[np.ndarray, " n"], scores: Float[np.ndarray, " n"], k: int
) -> list[Hit]:
    """The best `k` of `rows`, by (-score, doc_id), so that the top k is a prefix of any deeper top.

    Args:
        rows: row numbers in the collection, without repeats.
        scores: their scores, finite.
    """
    if len(rows) > k:
        # Keep every row that ties with the k-th best: which of them stays is for the ids to say, not for the partition.
        kth_best = np.partition(scores, len(scores) - k)[len(scores) - k]
        keep = scores >= kth_best
        rows, scores = rows[keep], scores[keep]
    order = np.lexsort((collection.id_rank[rows], -scores))[:k]
    return [
        Hit(collection.doc_ids[row], score)
        for row, score in zip(rows[order].tolist(), scores[order].tolist(), strict=True)
    ]
