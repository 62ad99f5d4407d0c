"""What the policy reads after a search.

    [1] numpy.polyfit: Least squares polynomial fit. See numpy.polyval poly1d
    [2] numpy.roots: Return the roots of a polynomial with coefficients given in p.
    [1] numpy.polyfit                                            a document that was described before
    order:1,2                                                    the references of these results, best first

Names stand between spaces, never beside a comma, so that the tokenizer gives them the pieces they have in a query.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from searchrl_jax.data.schema import Document

NO_RESULTS = "no results"
LINKS_WORD = " See"  # stands before the names of linked documents
LEFT_OUT = "left out"  # stands for an older observation where the history is compressed
NOTHING_FITS = "the results are too long to show"


@dataclass(frozen=True)
class ObservationFormat:
    """How much of each hit is shown.

    Attributes:
        words: words of the document's text at most; 0 shows titles only.
        see_also: names of linked documents at most.
        tokens: budget of the whole observation, counted by `count_tokens`.
        short_repeats: a document described earlier in the episode is shown by reference and title alone.
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
    """The local reference numbers of one episode, from 1, in order of first appearance."""

    doc_ids: list[str] = field(default_factory=list)
    described: set[str] = field(default_factory=set)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, doc_id: str) -> int:
        """The document's number; the next free one where it has none. Does not assign it: `assign` does."""
        return self._numbers.get(doc_id, len(self.doc_ids) + 1)

    def assign(self, doc_id: str) -> None:
        """Gives the document its number for good."""
        if doc_id not in self._numbers:
            self.doc_ids.append(doc_id)
            self._numbers[doc_id] = len(self.doc_ids)

    def doc_id(self, number: int) -> str | None:
        """The document shown under `number`, if there is one."""
        return self.doc_ids[number - 1] if 1 <= number <= len(self.doc_ids) else None


def render_hits(
    documents: Sequence[Document],
    references: References,
    excluded_titles: Collection[str],
    layout: ObservationFormat,
) -> tuple[str, tuple[str, ...]]:
    """The observation for `documents`, best first, and the ids of those that fitted into it.

    A hit too long for what is left of the budget is shown by reference and title; where even that doesn't fit, the
    observation ends before it. Only what is shown gets a reference.

    Args:
        references: the episode's numbers; extended by what is shown.
        excluded_titles: names that must not appear among the links.
    """
    lines: list[str] = []
    numbers: list[int] = []
    shown: list[str] = []
    for document in documents:
        head = f"[{references.number(document.doc_id)}] {title_of(document)}"
        described = document.doc_id in references.described
        details = "" if described and layout.short_repeats else _details(document, excluded_titles, layout)
        order = _order([*numbers, references.number(document.doc_id)])
        line, is_full = head + details, True
        if not layout.fits([*lines, line, order]):
            line, is_full = head, False
            if not layout.fits([*lines, line, order]):
                break
        lines.append(line)
        numbers.append(references.number(document.doc_id))
        shown.append(document.doc_id)
        references.assign(document.doc_id)
        if is_full:
            references.described.add(document.doc_id)
    if not lines:
        return (NOTHING_FITS if documents else NO_RESULTS), ()
    return "\n".join([*lines, _order(numbers)]), tuple(shown)


def title_of(document: Document) -> str:
    """The document's title on one line, or its id where it has none."""
    return " ".join((document.title or document.doc_id).split())


def see_also_of(metadata: Mapping[str, object]) -> list[str]:
    """The optional titles of linked documents.

    Raises:
        ValueError: `see_also` is there but is not a list of strings.
    """
    titles = metadata.get("see_also", [])
    if not isinstance(titles, (list, tuple)) or not all(isinstance(title, str) for title in titles):
        raise ValueError(f"expected metadata see_also to be a list of titles, got {titles!r}; correct the document")
    return [" ".join(title.split()) for title in titles]


def _order(numbers: Sequence[int]) -> str:
    """The references once more, written as a ranking is, so that one can be submitted by copying."""
    return "order:" + ",".join(map(str, numbers))


def _details(document: Document, excluded_titles: Collection[str], layout: ObservationFormat) -> str:
    """`: start of the text. See names`, without what is empty."""
    words = " ".join(document.text.split()[: layout.words])
    links = [title for title in see_also_of(document.metadata) if title not in excluded_titles][: layout.see_also]
    # Names of one word need no separator; titles that hold spaces do.
    names = " ; ".join(links) if any(" " in title for title in links) else " ".join(_siblings_shortened(links))
    return (f": {words}" if words else "") + (f"{LINKS_WORD} {names}" if names else "")


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
    return f"[{number}] {title_of(document)}" + _details(document, (), layout)
