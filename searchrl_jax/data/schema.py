"""The two records that everything else is about: a document that can be found, and a task that judges documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_GRADE = 1e6  # a sum of larger ones could overflow


def _require_text(owner: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{owner}.{name} must be a string, got {type(value).__name__} {value!r}")
    if not value.strip():
        raise ValueError(f"{owner}.{name} must not be empty, got {value!r}")


def _require_mapping(owner: str, name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{owner}.{name} must be a mapping, got {type(value).__name__} {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{owner}.{name} must have strings as keys, got {type(key).__name__} {key!r}")


@dataclass(frozen=True)
class Document:
    """One text that a search can return.

    Attributes:
        doc_id: unique within a corpus; judgements and rankings refer to it.
        text: what is indexed and, from its start, shown. Not empty.
        title: shown above the text; may be empty.
        metadata: anything else, by field name. `see_also`, where present, lists the titles of linked documents.

    Raises:
        ValueError: if `doc_id` or `text` is empty, or a field has another type.
    """

    doc_id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_text("Document", "doc_id", self.doc_id)
        _require_text("Document", "text", self.text)
        if not isinstance(self.title, str):
            raise ValueError(f"Document.title must be a string, got {type(self.title).__name__} {self.title!r}")
        _require_mapping("Document", "metadata", self.metadata)


@dataclass(frozen=True)
class Task:
    """One question and the documents judged for it.

    Attributes:
        task_id: unique within a data set; it names the task in metrics, trajectories and random keys.
        query: the question as the agent reads it. Not empty.
        relevance: grade of each judged document, from 0 to MAX_GRADE; a document that is not judged counts as 0.
            It may hold no grade above 0: such a task scores 0 whatever is ranked, and metrics count it so.
        excluded_ids: documents that neither observations nor rankings may hold (a query's own source, for one).
        metadata: anything else, by field name.

    Raises:
        ValueError: if one of these conditions is broken, or a relevant document is also excluded.
    """

    task_id: str
    query: str
    relevance: Mapping[str, float]
    excluded_ids: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_text("Task", "task_id", self.task_id)
        _require_text("Task", "query", self.query)
        _require_mapping("Task", "relevance", self.relevance)
        for doc_id, grade in self.relevance.items():
            _require_text("Task", "relevance key", doc_id)
            # bool is an int in Python, but a judgement of True is more often a mistake than a grade.
            if isinstance(grade, bool) or not isinstance(grade, int | float):
                got = f"{type(grade).__name__} {grade!r}"
                raise ValueError(f"Task.relevance[{doc_id!r}] must be a number, got {got}; use 1 for relevant")
            if not 0 <= grade <= MAX_GRADE:  # also refuses NaN
                raise ValueError(f"Task.relevance[{doc_id!r}] must be from 0 to {MAX_GRADE:,.0f}, got {grade!r}")
        if not isinstance(self.excluded_ids, tuple):
            raise ValueError(f"Task.excluded_ids must be a tuple, got {type(self.excluded_ids).__name__}")
        for doc_id in self.excluded_ids:
            _require_text("Task", "excluded_ids item", doc_id)
            if self.relevance.get(doc_id, 0) > 0:
                raise ValueError(f"Task.excluded_ids holds {doc_id!r}, which Task.relevance grades above 0: remove one")
        _require_mapping("Task", "metadata", self.metadata)
