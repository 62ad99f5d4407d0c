"""What the policy reads after a search.

    [6] numpy.polyfit: Least squares polynomial fit. See 6: numpy.polyval + poly1d
    [7] numpy.roots: Return the roots of a polynomial with coefficients given in p.
    [2] numpy.poly                                               a document that was described before
    order:6,7,2,1,3,4,5                                          from the second search on: all so far, best first

What leads that order stands first, also where a query was asked again and its next results do not lead: a policy that
has learned to begin with the first reference that it reads would else begin with the wrong one.

Names stand between spaces, never beside a comma, so that the tokenizer gives them the pieces they have in a query. The
reference before them tells one document's names from another's that begin alike, for whoever copies them, and the signs
between them tell the place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from searchrl_jax.data.schema import Document

NO_RESULTS = "no results"
NO_MORE_RESULTS = "no more results"
LINKS_WORD = " See"  # stands before the names of linked documents
LINK_SIGNS = "+&/"  # between these names, by place
LEFT_OUT = "left out"  # stands for an older observation where the history is compressed
NOTHING_FITS = "the results are too long to show"


@dataclass(frozen=True)
class ObservationFormat:
    """How much of each hit is shown.

    Attributes:
        words: words of the document's text at most; 0 shows titles only.
        see_also: names of linked documents at most.
        tokens: budget of the whole observation, counted by `count_tokens`.
        short_repeats: a document described earlier in the episode is shown by reference and title alone, while the
            policy can still read that description.
        count_tokens: the tokens of a text.
    """

    words: int
    see_also: int
    tokens: int
    short_repeats: bool
    count_tokens: Callable[[str], int]

    def __post_init__(self) -> None:
        for name, least in (("words", 0), ("see_also", 0), ("tokens", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"expected observation {name} >= {least}, got {getattr(self, name)}; raise it")

    def fits(self, lines: Sequence[str]) -> bool:
        """The lines stay within the budget."""
        return self.count_tokens("\n".join(lines)) <= self.tokens


@dataclass
class References:
    """The local reference numbers of one episode, from 1, in order of first appearance.

    Attributes:
        queries: asked so far.
        scores: of each document that was shown, see `fused`.
        described: the turn in which each document was described last.
    """

    doc_ids: list[str] = field(default_factory=list)
    queries: set[str] = field(default_factory=set)
    scores: dict[str, float] = field(default_factory=dict)
    described: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, doc_id: str) -> int:
        """The document's number; the next free one where it has none. Does not assign it: `assign` does."""
        return self._numbers.get(doc_id, len(self.doc_ids) + 1)

    def assign(self, doc_id: str) -> None:
        """Gives the document its number for good."""
        if doc_id not in self._numbers:
            self.doc_ids.append(doc_id)
            self._numbers[doc_id] = len(self.doc_ids)

    def fused(self, query: str, shown: Sequence[str], skipped: int = 0) -> dict[str, float]:
        """Scores after one more search: score(d) = w * score_before(d) + 1 / (5 + rank of d), d in `shown`.

        w is 1/10 where `query` is new, since who asks anew knows more: what it finds comes first. It is 1 for one that
        was asked before, to whichever tool.

        Args:
            skipped: results of the query before those in `shown`, which have the ranks skipped + 1, skipped + 2, ...

        Source:
            Cormack, Clarke & Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning
            Methods", SIGIR 2009.
        """
        weight = 1.0 if query in self.queries else 0.1
        scores = {doc_id: weight * score for doc_id, score in self.scores.items()}
        for rank, doc_id in enumerate(shown, start=skipped + 1):
            scores[doc_id] = scores.get(doc_id, 0.0) + 1 / (5 + rank)
        return scores

    def best(self, query: str, found: Sequence[str], skipped: int = 0) -> str | None:
        """What leads the ranking after a search that shows `found`; None before anything was shown."""
        return next(iter(_best_first(self.fused(query, found, skipped))), None)

    @property
    def ranking(self) -> list[str]:
        """All documents that were shown, best first; among equals those that were shown first."""
        return _best_first(self.scores)

    def doc_id(self, number: int) -> str | None:
        """The document shown under `number`, if there is one."""
        return self.doc_ids[number - 1] if 1 <= number <= len(self.doc_ids) else None


def render_hits(
    query: str,
    documents: Sequence[Document],
    references: References,
    excluded_titles: Collection[str],
    layout: ObservationFormat,
    *,
    leader: Document | None = None,
    skipped: int = 0,
    turn: int = 0,
    readable_from: int = 0,
) -> tuple[str, tuple[str, ...]]:
    """The observation for the `documents` that `query` found, best first, and the ids of those that fitted into it.

    A hit too long for what is left of the budget is shown by reference and title; where even that doesn't fit, the
    observation ends before it. Only what is shown gets a reference.

    Args:
        references: the episode's numbers and scores; extended by what is shown.
        excluded_titles: names that must not appear among the links.
        leader: the document that leads the ranking where none of `documents` does: it stands before them, for whoever
            takes what stands first for the best.
        skipped: results of the query that were shown before, see `References.fused`.
        turn: that the observation follows.
        readable_from: the first turn whose observation is not left out beside this one.
    """
    lines: list[str] = []
    shown: list[str] = []
    described_now: list[str] = []
    for document in (*([leader] if leader else []), *documents):
        found = [*shown, *([] if document is leader else [document.doc_id])]
        number = references.number(document.doc_id)
        head = f"[{number}] {title_of(document)}"
        described = references.described.get(document.doc_id)
        is_read = layout.short_repeats and described is not None and described >= readable_from
        details = "" if is_read else _details(document, number, excluded_titles, layout)
        order = _order(references, query, found, skipped)
        line, is_full = head + details, True
        if not layout.fits([*lines, line, *order]):
            line, is_full = head, False
            if not layout.fits([*lines, line, *order]):
                break
        lines.append(line)
        shown = found
        references.assign(document.doc_id)
        if is_full and not is_read:
            described_now.append(document.doc_id)
    if not shown and leader:
        return render_hits(
            query,
            documents,
            references,
            excluded_titles,
            layout,
            skipped=skipped,
            turn=turn,
            readable_from=readable_from,
        )
    if not shown:
        return (NOTHING_FITS if documents else NO_MORE_RESULTS if skipped else NO_RESULTS), ()
    text = "\n".join([*lines, *_order(references, query, shown, skipped)])
    references.scores = references.fused(query, shown, skipped)
    references.queries.add(query)
    references.described |= dict.fromkeys(described_now, turn)
    return text, tuple(shown)


def title_of(document: Document) -> str:
    """The document's title on one line, or its id where it has none."""
    return " ".join(document.title.split() or document.doc_id.split())


def see_also_of(metadata: Mapping[str, object]) -> list[str]:
    """The optional titles of linked documents.

    Raises:
        ValueError: `see_also` is there but is not a list of strings.
    """
    titles = metadata.get("see_also", [])
    if not isinstance(titles, (list, tuple)) or not all(isinstance(title, str) for title in titles):
        raise ValueError(f"expected metadata see_also to be a list of titles, got {titles!r}; correct the document")
    return [" ".join(title.split()) for title in titles]


def _order(references: References, query: str, shown: Sequence[str], skipped: int) -> list[str]:
    """A line with the ten best so far, written as a ranking is, so that one can be submitted by copying.

    No line after the first search, whose results are numbered in their order.
    """
    if not references.scores:
        return []
    best = _best_first(references.fused(query, shown, skipped))[:10]
    return ["order:" + ",".join(str(references.number(doc_id)) for doc_id in best)]


def _best_first(scores: Mapping[str, float]) -> list[str]:
    return sorted(scores, key=lambda doc_id: -scores[doc_id])


def _details(document: Document, number: int, excluded_titles: Collection[str], layout: ObservationFormat) -> str:
    """`: start of the text. See number: names`, without what is empty."""
    words = " ".join(document.text.split()[: layout.words])
    links = [title for title in see_also_of(document.metadata) if title not in excluded_titles][: layout.see_also]
    # Titles that hold spaces may hold these signs too; a semicolon parts them.
    names = " ; ".join(links) if any(" " in title for title in links) else _enumerated(_siblings_shortened(links))
    return (f": {words}" if words else "") + (f"{LINKS_WORD} {number}: {names}" if names else "")


def _enumerated(names: Sequence[str]) -> str:
    """The names with signs between them that differ from place to place, which no index reads.

    Where names begin and end alike, whoever copies them loses count otherwise, and writes one of them for ever:
    dynamic_slice + dynamic_update_slice & dynamic_slice_in_dim.
    """
    following = (f" {LINK_SIGNS[place % len(LINK_SIGNS)]} {name}" for place, name in enumerate(names[1:]))
    return "".join([*names[:1], *following])


def _siblings_shortened(names: Sequence[str]) -> list[str]:
    """Dotted names without the parent that they share with the name before; a parent repeated makes copying ambiguous.

    numpy.polyval numpy.poly1d scipy.optimize.root  ->  numpy.polyval poly1d scipy.optimize.root
    """
    parents = [name.rpartition(".")[0] for name in names]
    return [
        name.rpartition(".")[2] if index and parent and parent == parents[index - 1] else name
        for index, (name, parent) in enumerate(zip(names, parents, strict=True))
    ]


def describe(document: Document, *, number: int, words: int, see_also: int) -> str:
    """One line of an observation, as the policy reads it: what a tokenizer is trained on."""
    layout = ObservationFormat(words, see_also, tokens=16, short_repeats=True, count_tokens=len)
    return f"[{number}] {title_of(document)}" + _details(document, number, (), layout)
