import json
import re

import numpy as np
import pytest

from searchrl_jax.data.collection import read_documents, read_tasks, split_tasks, spread
from searchrl_jax.data.schema import Document, Task

DOCUMENTS = [Document("d1", "one"), Document("d2", "two")]
GOOD_DOCUMENT = '{"doc_id": "d9", "text": "nine"}\n'
GOOD_TASK = '{"task_id": "q9", "query": "nine?", "relevance": {"d1": 1}}\n'


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_documents_keep_order_and_unknown_fields(tmp_path):
    path = write(
        tmp_path / "docs.jsonl",
        {"doc_id": "b", "text": "Zwei ü", "title": "B", "year": 2019, "metadata": {"tags": ["x"]}},
        "",
        {"doc_id": "a", "text": "one", "see_also": ["B"]},
    )
    assert read_documents(str(path)) == [
        Document("b", "Zwei ü", "B", {"year": 2019, "tags": ["x"]}),
        Document("a", "one", "", {"see_also": ["B"]}),
    ]


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"doc_id": "a", "text": "one"}\r\n')
    assert read_documents(path) == [Document("a", "one")]


def test_tasks_keep_all_fields(tmp_path):
    row = {"task_id": "q", "query": "?", "relevance": {"d1": 2, "d2": 0}, "excluded_ids": ["d2"]}
    row |= {"split": "test", "by": 7}
    (task,) = read_tasks(write(tmp_path / "tasks.jsonl", row), DOCUMENTS)
    assert task == Task("q", "?", {"d1": 2.0, "d2": 0.0}, ("d2",), {"split": "test", "by": 7})


@pytest.mark.parametrize(
    ("row", "field", "names"),
    [
        ('{"doc_id": "a", "text": ', None, "not JSON"),
        ('{"doc_id": "a", "text": ' + "[" * 100_000, None, "nested too deep"),
        ("[1, 2]", None, r"expected a JSON object, got a list"),
        ("3", None, "expected a JSON object, got a number"),
        ('{"doc_id": "a", "doc_id": "b", "text": "x"}', None, "'doc_id' is given twice"),
        ({"text": "x"}, "doc_id", "is missing"),
        ({"doc_id": "a"}, "text", "is missing"),
        ({"doc_id": "", "text": "x"}, "doc_id", "must not be empty"),
        ({"doc_id": "a", "text": "  "}, "text", "must not be empty"),
        ({"doc_id": 7, "text": "x"}, "doc_id", r"must be a string, got a number \(7\)"),
        ({"doc_id": "a", "text": None}, "text", "must be a string, got null"),
        ({"doc_id": "a", "text": "x", "title": ["t"]}, "title", "must be a string, got a list"),
        ({"doc_id": "a", "text": "x \ud800"}, "text", "half of a surrogate pair"),
        ({"doc_id": "a", "text": "x", "metadata": 3}, "metadata", "must be an object"),
        ({"doc_id": "a", "text": "x", "year": 1, "metadata": {"year": 2}}, "year", "is given twice"),
        ({"doc_id": "a", "text": "x", "see_also": "b"}, "see_also", "must be a list of document titles"),
        ({"doc_id": "d9", "text": "x"}, "doc_id", r"'d9' was used on line 1 already"),
    ],
)
def test_bad_document_names_file_line_and_field(tmp_path, row, field, names):
    path = write(tmp_path / "docs.jsonl", GOOD_DOCUMENT, row)
    place = f"{path}, line 3" + (f", field {field!r}" if field else "")
    with pytest.raises(ValueError, match=f"^{re.escape(place)}: .*{names}"):
        read_documents(path)


@pytest.mark.parametrize(
    ("change", "field", "names"),
    [
        ({"task_id": None}, "task_id", "must be a string, got null"),
        ({"task_id": "q9"}, "task_id", "'q9' was used on line 1 already"),
        ({"query": ""}, "query", "must not be empty"),
        ({"relevance": ["d1"]}, "relevance", "must be an object like"),
        ({"relevance": {"d1": "high"}}, "relevance", r"the grade of 'd1' must be a number, got a string"),
        ({"relevance": {"d1": True}}, "relevance", "must be a number, got a boolean"),
        ({"relevance": {"d1": -1}}, "relevance", "the grade of 'd1' must be from 0 to 1,000,000, got -1"),
        ({"relevance": {"d1": float("nan")}}, "relevance", "must be from 0"),
        ({"relevance": {"d1": float("inf")}}, "relevance", "must be from 0"),
        ({"relevance": {"d1": 10**400}}, "relevance", "must be from 0"),
        ({"relevance": {"d1": 1.7e308}}, "relevance", "must be from 0"),
        ({"relevance": {}}, "relevance", "must grade at least one document above 0"),
        ({"relevance": {"d1": 0}}, "relevance", "must grade at least one document above 0"),
        ({"relevance": {"d1": 1, "d7": 1}}, "relevance", "'d7' is no document of the corpus"),
        ({"excluded_ids": "d2"}, "excluded_ids", "must be a list of document ids"),
        ({"excluded_ids": [2]}, "excluded_ids", "must hold non-empty strings only"),
        ({"excluded_ids": ["d7"]}, "excluded_ids", "'d7' is no document of the corpus"),
        ({"excluded_ids": ["d1"]}, "excluded_ids", "'d1' is graded 1 in relevance"),
        ({"split": "dev"}, "split", "must be one of train, validation, test"),
    ],
)
def test_bad_task_names_file_line_and_field(tmp_path, change, field, names):
    row = {"task_id": "q", "query": "?", "relevance": {"d1": 1}, **change}
    path = write(tmp_path / "tasks.jsonl", GOOD_TASK, row)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}, line 3, field {field!r}')}: .*{names}"):
        read_tasks(path, DOCUMENTS)


def test_missing_relevance_is_named(tmp_path):
    path = write(tmp_path / "tasks.jsonl", {"task_id": "q", "query": "?"})
    with pytest.raises(ValueError, match=r"line 1, field 'relevance': is missing"):
        read_tasks(path, DOCUMENTS)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_documents(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="is a folder"):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match=r"docs\.jsonl is empty"):
        read_documents(write(tmp_path / "docs.jsonl", "", " "))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(GOOD_DOCUMENT.encode() + '{"doc_id": "a", "text": "Zürich"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: not UTF-8 \(byte 27 is 0xfc\)"):
        read_documents(latin)


def test_split_field_wins_and_the_rest_follows_the_answers():
    def task(name, relevance, **metadata):
        return Task(name, "?", relevance, metadata=metadata)

    rows = [task(f"q{index}", {f"d{index}": 1}) for index in range(1000)]
    splits = split_tasks(rows)
    sizes = {name: round(len(part), -2) for name, part in splits.items()}
    assert sizes == {"train": 700, "validation": 100, "test": 200}
    assert split_tasks(rows[::-1])["test"] == splits["test"][::-1]

    # Another name, another grade and a judgement of 0 change nothing.
    again = split_tasks([task(f"r{index}", {f"d{index}": 3, "d0": 0}) for index in range(1, 1000)])
    sides = {name: [task.task_id[1:] for task in part if task.task_id != "q0"] for name, part in splits.items()}
    assert {name: [task.task_id[1:] for task in part] for name, part in again.items()} == sides
    for name in splits:
        assert split_tasks([task("q5", {"d5": 1}, split=name)])[name]


def test_the_hashed_split_never_changes():
    # Written out: another hash, or Python's salted one, would move a user's test tasks into training.
    tasks = [Task(name, "?", {name: 1}) for name in ("a", "b", "c", "d", "e", "f", "g", "h")]
    splits = {name: [task.task_id for task in part] for name, part in split_tasks(tasks).items()}
    assert splits == {"train": ["b", "c", "d", "e", "g", "h"], "validation": [], "test": ["a", "f"]}


def test_spread_takes_of_every_slice_its_share():
    tasks = [Task(f"q{index}", "?", {"d": 1}) for index in range(10)]
    assert [task.task_id for task in spread(tasks, 4)] == ["q0", "q2", "q5", "q7"]
    assert spread(tasks, 10) == spread(tasks, 0) == spread(tasks, 11) == tasks
    slices = ["bridge"] * 152 + ["known item"] * 177 + ["pointed bridge"] * 134
    for order in (slices, slices[::-1], ["a", "b"] * 80):
        kinds = [Task(f"q{index}", "?", {"d": 1}, metadata={"slice": name}) for index, name in enumerate(order)]
        places = [int(task.task_id[1:]) for task in spread(kinds, 80)]
        assert places == sorted(set(places)) and len(places) == 80
        for name in dict.fromkeys(order):
            share = 80 * order.count(name) / len(order)
            assert abs(sum(order[place] == name for place in places) - share) < 1
            # From beginning to end: the largest gap is that of an even spread, rounded up.
            of_slice = [place for place, kind in enumerate(order) if kind == name]
            ranks = [of_slice.index(place) for place in places if order[place] == name]
            assert max(np.diff([-1, *ranks, len(of_slice)])) <= -(-len(order) // 80) + 1


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="task 'q' has split 'dev'"):
        split_tasks([Task("q", "?", {"d": 1}, metadata={"split": "dev"})])
