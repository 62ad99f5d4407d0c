"""What retrieval asks of a document, and the collection an index keeps of it: ids, order and metadata."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from searchrl_jax.retrieval.filters import MetadataTable


class SearchableDocument(Protocol):
    """Any object with these four attributes can be indexed."""

    @property
    def doc_id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def text_to_index(document: SearchableDocument) -> str:
    """The searched text of a document: its title, if it has one, above its text."""
    return f"{document.title}\n{document.text}" if document.title else document.text


@dataclass(frozen=True)
class Collection:
    """Ids and metadata of the indexed documents, row by row.

    Attributes:
        doc_ids: unique and non-empty.
        metadata: plain JSON values, copied, so that a built index and a loaded one filter alike.
        id_rank: position of each row in the order of ids; it breaks ties of scores.
    """

    doc_ids: tuple[str, ...]
    metadata: MetadataTable
    id_rank: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.doc_ids)


def make_collection(doc_ids: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Collection:
    """The collection of these rows.

    Raises:
        ValueError: an id that is empty, not a string, or there twice.
    """
    seen: dict[str, int] = {}
    for row, doc_id in enumerate(doc_ids):
        if not isinstance(doc_id, str) or not doc_id:
            raise ValueError(f"document {row}: doc_id must be a non-empty string, got {doc_id!r}")
        if doc_id in seen:
            raise ValueError(f"doc_id {doc_id!r} is used by documents {seen[doc_id]} and {row}; rename or drop one")
        seen[doc_id] = row
    order = sorted(range(len(doc_ids)), key=doc_ids.__getitem__)
    id_rank = np.empty(len(doc_ids), np.int64)
    id_rank[order] = np.arange(len(doc_ids))
    return Collection(tuple(doc_ids), MetadataTable(metadata), id_rank)


def read_collection(documents: Iterable[SearchableDocument]) -> tuple[Collection, list[str]]:
    """The collection of `documents`, and their texts to index in the same order.

    Raises:
        ValueError: a bad or repeated doc_id, a text or title that is no string, metadata that is no JSON object.
    """
    rows = list(documents)
    metadata = []
    for row, document in enumerate(rows):
        missing = [field for field in ("doc_id", "text", "title", "metadata") if not hasattr(document, field)]
        if missing:
            raise ValueError(
                f"document {row}, a {type(document).__name__}, lacks the attributes {', '.join(missing)}; "
                "a document has doc_id, text, title and metadata"
            )
        for field, value in (("text", document.text), ("title", document.title)):
            if not isinstance(value, str):
                raise ValueError(
                    f"document {row} ({document.doc_id!r}): {field} must be a string, got {type(value).__name__}"
                )
        metadata.append(_plain_metadata(row, document))
    return make_collection([document.doc_id for document in rows], metadata), [text_to_index(row) for row in rows]


def _plain_metadata(row: int, document: SearchableDocument) -> dict[str, Any]:
    where = f"document {row} ({document.doc_id!r})"
    if not isinstance(document.metadata, Mapping) or not all(isinstance(field, str) for field in document.metadata):
        raise ValueError(f"{where}: metadata must map field names (strings) to values, got {document.metadata!r}")
    plain = {}
    for field, value in document.metadata.items():
        try:
            plain[field] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: metadata field {field!r} is stored as JSON, which {value!r} cannot be ({error}); "
                "give a string, a number, true, false, null, a list or an object"
            ) from error
    return plain
