"""Reciprocal rank fusion: one ranking out of several, from the ranks alone."""

import math
from collections.abc import Sequence

from searchrl_jax.retrieval.ranking import Hit


def reciprocal_rank_fusion(rankings: Sequence[Sequence[str | Hit]], k: int = 60, depth: int | None = None) -> list[Hit]:
    """All documents of `rankings`, by (-score, doc_id), with

        score(d) = sum over the rankings that hold d of 1 / (k + rank of d),    rank = 1, 2, ...

    The scores of the rankings are not used, so rankings of different systems can be fused.

    Args:
        rankings: each best first, of ids or of hits.
        k: dampens the weight of the first ranks; at least 0.
        depth: ranks below it are ignored; None reads each ranking to its end.

    Raises:
        ValueError: a document twice in one ranking, or `k` or `depth` out of range.

    Source:
        Cormack, Clarke and Büttcher 2009, "Reciprocal rank fusion outperforms Condorcet and individual rank learning
        methods", SIGIR, section 2, with their k = 60.
    """
    if isinstance(k, bool) or not isinstance(k, (int, float)) or not 0 <= k < math.inf:
        raise ValueError(f"k, added to every rank, must be a number of at least 0, got {k!r}")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ValueError(f"depth must be a whole number of at least 1, or None to read whole rankings, got {depth!r}")
    terms: dict[str, list[float]] = {}
    for number, ranking in enumerate(rankings):
        if isinstance(ranking, str):
            raise ValueError(f"ranking {number} must be a sequence of ids or hits, got the string {ranking!r}")
        seen: set[str] = set()
        for rank, entry in enumerate(ranking[:depth], start=1):
            doc_id = entry.doc_id if isinstance(entry, Hit) else entry
            if not isinstance(doc_id, str):
                raise ValueError(f"ranking {number}, rank {rank}: expected an id (string) or a Hit, got {doc_id!r}")
            if doc_id in seen:
                raise ValueError(f"ranking {number} holds {doc_id!r} twice; a ranking names each document once")
            seen.add(doc_id)
            terms.setdefault(doc_id, []).append(1.0 / (k + rank))
    # fsum, so that the order of the rankings cannot change a score, and with it the order of ties.
    hits = [Hit(doc_id, math.fsum(parts)) for doc_id, parts in terms.items()]
    return sorted(hits, key=lambda hit: (-hit.score, hit.doc_id))
