"""A user's own documents and tasks, one JSON object a line, and their split.

    {"doc_id": "d1", "text": "...", "title": "...", "year": 2019}
    {"task_id": "q1", "query": "...", "relevance": {"d1": 2}, "excluded_ids": [], "split": "test"}

`doc_id`, `text`, `task_id`, `query` and `relevance` are required. A field that is none of these becomes metadata under
its own name, and so do the entries of an object called `metadata`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from searchrl_jax.data.schema import MAX_GRADE, Document, Task

SPLITS = ("train", "validation", "test")

_VALIDATION_SHARE, _TEST_SHARE = 0.1, 0.2


class _Row:
    """One line of a file: reads its fields and says where it stands when one is bad."""

    def __init__(self, path: Path, line: int, fields: Mapping[str, Any]) -> None:
        self._path, self.line, self._fields = path, line, fields

    def error(self, name: str, message: str) -> ValueError:
        return ValueError(f"{self._path}, line {self.line}, field {name!r}: {message}")

    def required_text(self, name: str) -> str:
        if name not in self._fields:
            present = ", ".join(sorted(self._fields)) or "none"
            raise self.error(name, f"is missing; add a non-empty string (fields present: {present})")
        text = self.text(name)
        if not text.strip():
            raise self.error(name, f"must not be empty, got {text!r}")
        return text

    def text(self, name: str) -> str:
        value = self._fields.get(name, "")
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {_described(value)}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.error(name, r"holds half of a surrogate pair (\ud800 to \udfff), which is no text; remove it")
        return value

    def relevance(self) -> dict[str, float]:
        if "relevance" not in self._fields:
            raise self.error("relevance", 'is missing; add an object like {"doc_id": 1}')
        value = self._fields["relevance"]
        if not isinstance(value, dict):
            raise self.error("relevance", f'must be an object like {{"doc_id": 1}}, got {_described(value)}')
        for doc_id, grade in value.items():
            if isinstance(grade, bool) or not isinstance(grade, int | float):
                raise self.error("relevance", f"the grade of {doc_id!r} must be a number, got {_described(grade)}")
            if not 0 <= grade <= MAX_GRADE:  # also refuses NaN
                raise self.error(
                    "relevance", f"the grade of {doc_id!r} must be from 0 to {MAX_GRADE:,.0f}, got {grade!r}"
                )
        if not any(grade > 0 for grade in value.values()):
            raise self.error("relevance", f"must grade at least one document above 0, got {value!r}; else drop the row")
        return {doc_id: float(grade) for doc_id, grade in value.items()}

    def id_list(self, name: str) -> tuple[str, ...]:
        value = self._fields.get(name, [])
        if not isinstance(value, list):
            raise self.error(name, f"must be a list of document ids, got {_described(value)}")
        for item in value:
            if not isinstance(item, str) or not item:
                raise self.error(name, f"must hold non-empty strings only, got {_described(item)}")
        return tuple(value)

    def metadata(self, known: Sequence[str]) -> dict[str, Any]:
        """The unknown fields, joined with those of the object `metadata`."""
        nested = self._fields.get("metadata", {})
        if not isinstance(nested, dict):
            raise self.error("metadata", f"must be an object, got {_described(nested)}")
        beside = {name: value for name, value in self._fields.items() if name not in known and name != "metadata"}
        for name in nested:
            if name in beside:
                raise self.error(name, "is given twice, on its own and inside metadata; keep one")
        return {**nested, **beside}


def _described(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return f"{names.get(type(value), 'a number')} ({json.dumps(value, ensure_ascii=False)[:80]})"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {repeated!r} is given twice in one object; keep one")
    return fields


def _rows(path: Path) -> Iterator[_Row]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}: expected a file with one JSON object a line")
    found = False
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"byte {error.start + 1} is 0x{raw[error.start]:02x}"
                raise ValueError(f"{path}, line {number}: not UTF-8 ({place}); save the file as UTF-8") from None
            if not line.strip():
                continue
            try:
                fields = json.loads(line.rstrip("\r\n"), object_pairs_hook=_without_repeats)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
            except RecursionError:
                raise ValueError(f"{path}, line {number}: nested too deep; expected a flat JSON object") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {_described(fields)}")
            found = True
            yield _Row(path, number, fields)
    if not found:
        raise ValueError(f"{path} is empty: expected one JSON object a line")


def _claim(row: _Row, name: str, value: str, lines: dict[str, int]) -> None:
    if value in lines:
        raise row.error(name, f"{value!r} was used on line {lines[value]} already; ids must be unique")
    lines[value] = row.line


def read_documents(path: str | Path) -> list[Document]:
    """The documents of a JSONL file, in its order. Blank lines are skipped.

    Raises:
        ValueError: naming file, line and field, for a row that is not a JSON object, a field that is missing, empty or
            of another type, and an id used before (with both lines); also for a file that is missing, empty or not
            UTF-8.
    """
    documents: list[Document] = []
    lines: dict[str, int] = {}
    for row in _rows(Path(path)):
        doc_id = row.required_text("doc_id")
        _claim(row, "doc_id", doc_id, lines)
        metadata = row.metadata(("doc_id", "text", "title"))
        see_also = metadata.get("see_also", [])
        if not isinstance(see_also, list) or not all(isinstance(title, str) for title in see_also):
            raise row.error("see_also", f"must be a list of document titles, got {_described(see_also)}")
        documents.append(Document(doc_id, row.required_text("text"), row.text("title"), metadata))
    return documents


def read_tasks(path: str | Path, documents: Sequence[Document]) -> list[Task]:
    """The tasks of a JSONL file, in its order, with judgements checked against the documents.

    Raises:
        ValueError: as `read_documents`; also for a judgement or an exclusion that points to no document, a grade that
            is negative or not finite, a task that grades nothing above 0 or excludes what it grades so, and an unknown
            split.
    """
    known = {document.doc_id for document in documents}
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for row in _rows(Path(path)):
        task_id = row.required_text("task_id")
        _claim(row, "task_id", task_id, lines)
        query = row.required_text("query")
        relevance, excluded = row.relevance(), row.id_list("excluded_ids")
        for name, doc_ids in (("relevance", relevance), ("excluded_ids", excluded)):
            for doc_id in doc_ids:
                if doc_id not in known:
                    raise row.error(name, f"{doc_id!r} is no document of the corpus ({len(known)} documents)")
        for doc_id in excluded:
            if relevance.get(doc_id, 0.0) > 0:
                raise row.error("excluded_ids", f"{doc_id!r} is graded {relevance[doc_id]:g} in relevance; remove one")
        metadata = row.metadata(("task_id", "query", "relevance", "excluded_ids"))
        if "split" in metadata and metadata["split"] not in SPLITS:
            raise row.error("split", f"must be one of {', '.join(SPLITS)}, got {_described(metadata['split'])}")
        tasks.append(Task(task_id, query, relevance, excluded, metadata))
    return tasks


def split_tasks(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """The tasks of "train", "validation" and "test" (70, 10 and 20 %), in the given order.

    A task with a `split` in its metadata goes there. Else a hash of its sorted relevant document ids decides, so that
    tasks with the same answers stand on one side whatever they are called; tasks that share only some of them may not.

    Raises:
        ValueError: a `split` that is none of the three.
    """
    splits: dict[str, list[Task]] = {name: [] for name in SPLITS}
    for task in tasks:
        split = task.metadata.get("split") or _hashed_split(task)
        if split not in splits:
            raise ValueError(f"task {task.task_id!r} has split {split!r}: expected one of {', '.join(SPLITS)}")
        splits[split].append(task)
    return splits


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` of `tasks`, in their order: of each slice its share, evenly from its beginning to its end.

    With the tasks in the order of their slices, task floor(i n / count) of n, for each i. The first ones might all be
    of one slice.

    Args:
        count: 0, or more than there are, for all of them.
    """
    if not 0 < count < len(tasks):
        return list(tasks)
    slices = [str(task.metadata.get("slice", "")) for task in tasks]
    rank = {name: place for place, name in enumerate(dict.fromkeys(slices))}
    in_slices = sorted(range(len(tasks)), key=lambda place: rank[slices[place]])
    return [tasks[place] for place in sorted(in_slices[i * len(tasks) // count] for i in range(count))]


def _hashed_split(task: Task) -> str:
    targets = sorted(doc_id for doc_id, grade in task.relevance.items() if grade > 0)
    digest = hashlib.sha256(json.dumps(targets).encode()).digest()
    where = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if where < _TEST_SHARE else "validation" if where < _TEST_SHARE + _VALIDATION_SHARE else "train"
