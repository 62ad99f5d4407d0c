"""Saving and loading: whole or not at all, relocatable, without pickle; and what a collection refuses."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from searchrl_jax.data.schema import Document
from searchrl_jax.retrieval import Retriever, build_index, load_index

DOCUMENTS = [
    Document("a", "matrix norm", "numpy.linalg.norm", {"package": "numpy", "tags": ("x", "y"), "year": 2020}),
    Document("b", "fourier transform", metadata={"package": "scipy"}),
    Document("é", "我去过黄山"),
]
KINDS = ["bm25", "vector"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_index_moves_and_searches_as_before(kind: str, tmp_path: Path) -> None:
    index = build_index(DOCUMENTS, kind)
    assert isinstance(index, Retriever)
    index.save(tmp_path / "deep" / "first")
    os.rename(tmp_path / "deep", tmp_path / "moved")
    loaded = load_index(str(tmp_path / "moved" / "first"))
    for query in ("norm", "numpy.linalg.norm", "黄山", "", "transforms of a matrix"):
        assert loaded.search(query) == index.search(query)
        for where in ({"package": "numpy"}, {"tags": "y"}, {"year": {"gte": 2020}}):
            assert loaded.search(query, where=where) == index.search(query, where=where)


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_no_pickle_and_no_path(kind: str, tmp_path: Path) -> None:
    build_index(DOCUMENTS, kind).save(tmp_path / "index")
    files = [file for file in (tmp_path / "index").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".npy"}
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes()
        if file.suffix == ".npy":
            np.load(file, allow_pickle=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_replaced_whole(kind: str, tmp_path: Path) -> None:
    build_index(DOCUMENTS, "bm25").save(tmp_path / "index")
    build_index(DOCUMENTS[:1], kind).save(tmp_path / "index")
    assert [hit.doc_id for hit in load_index(tmp_path / "index").search("norm fourier")] == ["a"]
    assert os.listdir(tmp_path) == ["index"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_save_leaves_the_old_index(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build_index(DOCUMENTS, kind)
    index.save(tmp_path / "index")
    before = load_index(tmp_path / "index").search("norm")

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        build_index(DOCUMENTS[1:], kind).save(tmp_path / "index")
    assert load_index(tmp_path / "index").search("norm") == before
    assert os.listdir(tmp_path) == ["index"]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_that_is_no_index_is_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    with pytest.raises(ValueError, match="not an index"):
        build_index(DOCUMENTS).save(tmp_path / "mine")
    assert (tmp_path / "mine" / name).read_text() == "{}"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not an index"):
        build_index(DOCUMENTS).save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    build_index(DOCUMENTS).save(tmp_path / "index")
    assert load_index(tmp_path / "index").search("norm")


def test_what_is_no_index_is_not_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="not an index"):
            load_index(path)


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("bm25", "collection.json", '{"doc_ids": ["a"], "metadata": [{}]}'),
        ("bm25", "collection.json", "{"),
        ("bm25", "bm25s/data.csc.index.npy", "x"),
        ("bm25", "bm25s/params.index.json", None),
        ("vector", "vectors.npy", "x"),
        ("vector", "vectors.npy", None),
    ],
)
def test_a_damaged_index_is_refused(kind: str, name: str, content: str | None, tmp_path: Path) -> None:
    build_index(DOCUMENTS, kind).save(tmp_path / "index")
    file = tmp_path / "index" / name
    assert file.exists()
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(ValueError, match="damaged"):
        load_index(tmp_path / "index")


def test_another_version_is_refused(tmp_path: Path) -> None:
    build_index(DOCUMENTS).save(tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        load_index(tmp_path / "index")


def test_a_bm25_index_takes_no_encoder(tmp_path: Path) -> None:
    build_index(DOCUMENTS).save(tmp_path / "index")
    with pytest.raises(ValueError, match="takes no encoder"):
        load_index(tmp_path / "index", encoder=lambda texts: np.zeros((len(texts), 2), np.float32))


def test_metadata_changed_after_the_build_does_not_reach_the_index() -> None:
    metadata = {"package": "numpy"}
    index = build_index([Document("a", "norm", metadata=metadata)])
    metadata["package"] = "scipy"
    assert index.search("norm", where={"package": "numpy"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([Document("a", "x"), Document("b", "y"), Document("a", "z")], "'a' is used by documents 0 and 2"),
        ([SimpleNamespace(doc_id="", text="x", title="", metadata={})], "non-empty string"),
        ([SimpleNamespace(doc_id=7, text="x", title="", metadata={})], "non-empty string"),
        ([SimpleNamespace(doc_id="a", text=None, title="", metadata={})], "text must be a string"),
        ([SimpleNamespace(doc_id="a", text="x", title="", metadata=None)], "metadata must map"),
        ([SimpleNamespace(doc_id="a", text="x", title="", metadata={"s": {1, 2}})], "'a'.*'s' is stored as JSON"),
        ([{"doc_id": "a", "text": "x"}], "a dict, lacks the attributes doc_id"),
    ],
)
def test_bad_documents_are_refused(kind: str, documents: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(documents, kind)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="bm25, vector, got 'dense'"):
        build_index(DOCUMENTS, "dense")
