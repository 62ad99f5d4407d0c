import math

import pytest

from searchrl_jax.data.schema import Document, Task


def test_defaults_are_not_shared():
    first, second = Document("a", "text"), Document("b", "text")
    assert first.title == "" and first.metadata == {} and first.metadata is not second.metadata
    assert Task("q", "query", {}).excluded_ids == ()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("", "text"), "Document.doc_id must not be empty"),
        ((3, "text"), "Document.doc_id must be a string, got int 3"),
        (("a", " \n"), "Document.text must not be empty"),
        (("a", "text", None), "Document.title must be a string"),
        (("a", "text", "", [1]), "Document.metadata must be a mapping"),
        (("a", "text", "", {1: 2}), "Document.metadata must have strings as keys"),
    ],
)
def test_document_refuses(arguments, names):
    with pytest.raises(ValueError, match=names):
        Document(*arguments)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("", "query", {}), "Task.task_id must not be empty"),
        (("q", "", {}), "Task.query must not be empty"),
        (("q", "query", ["d"]), "Task.relevance must be a mapping"),
        (("q", "query", {"": 1}), "Task.relevance key must not be empty"),
        (("q", "query", {"d": True}), r"Task.relevance\['d'\] must be a number, got bool"),
        (("q", "query", {"d": "1"}), r"Task.relevance\['d'\] must be a number, got str"),
        (("q", "query", {"d": -1}), r"Task.relevance\['d'\] must be from 0 to 1,000,000, got -1"),
        (("q", "query", {"d": math.nan}), "must be from 0"),
        (("q", "query", {"d": math.inf}), "must be from 0"),
        (("q", "query", {"d": 10**400}), "must be from 0"),
        (("q", "query", {"d": 1}, ["e"]), "Task.excluded_ids must be a tuple"),
        (("q", "query", {"d": 1}, ("d",)), "Task.excluded_ids holds 'd', which Task.relevance grades above 0"),
    ],
)
def test_task_refuses(arguments, names):
    with pytest.raises(ValueError, match=names):
        Task(*arguments)
