"""Vector search: exactness, ties, filters, threads, and each public fault of vector indices."""

import importlib.util
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from searchrl_jax.data.schema import Document
from searchrl_jax.retrieval import Retriever, build_index, load_index, vector

WIDTH = 33  # odd, so that no block size divides it


def hashed(texts: Sequence[str]) -> np.ndarray:
    """A random unit vector for each text, a function of the text alone."""
    rows = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=WIDTH) for text in texts]
    return np.stack([row / np.linalg.norm(row) for row in rows]).astype(np.float32)


def corpus(count: int) -> list[Document]:
    # Every third document repeats a text, so that there are ties.
    return [
        Document(f"d{row:04}", f"text {row if row % 3 else row // 9}", metadata={"part": row % 5})
        for row in range(count)
    ]


def oracle(documents: Sequence[Document], query: str, k: int) -> list[str]:
    scores = np.round(hashed([d.text for d in documents]).astype(np.float64) @ hashed([query])[0].astype(np.float64), 6)
    order = sorted(range(len(documents)), key=lambda row: (-scores[row], documents[row].doc_id))
    return [documents[row].doc_id for row in order[:k]]


@pytest.fixture(scope="module")
def tree() -> Retriever:
    return build_index(corpus(2000), "vector", encoder=hashed, tree_from=256, leaves=44, leaves_to_search=15)


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_hits_are_the_nearest_with_ties_by_id(index: str) -> None:
    documents = corpus(300)
    retriever = build_index(documents, "vector", encoder=hashed, index=index)
    for query in ("text 4", "something", "else"):
        deepest = retriever.search(query, k=300)
        assert [hit.doc_id for hit in deepest] == oracle(documents, query, 300)
        assert all(retriever.search(query, k=k) == deepest[:k] for k in (1, 2, 3, 5, 10, 40, 41, 299))


def test_scann_and_exact_agree_bit_for_bit_below_the_tree() -> None:
    documents = corpus(500)
    queries = [f"query {i}" for i in range(50)]
    one, other = (build_index(documents, "vector", encoder=hashed, index=name) for name in ("scann", "exact"))
    assert one.search_many(queries, 20) == other.search_many(queries, 20)


def test_a_boundary_full_of_ties_is_cut_by_id() -> None:
    documents = [Document(f"e{row:03}", "same") for row in range(100)] + corpus(200)
    documents += [Document(f"d{row}", "same") for row in (8, 3, 5, 1, 9, 2, 7, 4, 6, 0)]
    retriever = build_index(documents, "vector", encoder=hashed)
    assert [hit.doc_id for hit in retriever.search("same", k=4)] == ["d0", "d1", "d2", "d3"]


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_k_beyond_the_collection_returns_each_document_once(index: str) -> None:
    hits = build_index(corpus(5), "vector", encoder=hashed, index=index).search("query", k=8)
    assert sorted(hit.doc_id for hit in hits) == [f"d{row:04}" for row in range(5)]
    assert all(np.isfinite(hit.score) for hit in hits)


def test_few_documents_are_searched_without_a_tree() -> None:
    documents = corpus(5)
    retriever = build_index(documents, "vector", encoder=hashed, leaves=100)
    assert [hit.doc_id for hit in retriever.search("query", k=3)] == oracle(documents, "query", 3)


def test_a_tree_searched_too_narrowly_still_returns_k() -> None:
    retriever = build_index(
        corpus(1000), "vector", encoder=hashed, tree_from=256, leaves=100, leaves_to_search=1, shortlist=200
    )
    hits = retriever.search("query", k=100)
    assert len({hit.doc_id for hit in hits}) == 100


def test_a_tree_finds_most_of_the_nearest(tree: Retriever) -> None:
    # Random vectors have no clusters: the hardest case for a tree, which here searches a third of its leaves. Below 10
    # it is the tree that answers, and not an exact search.
    documents = corpus(2000)
    found = [len({hit.doc_id for hit in tree.search(f"q{i}")} & set(oracle(documents, f"q{i}", 10))) for i in range(20)]
    assert 4 < np.mean(found) < 10


def test_a_tree_keeps_prefixes_and_serves_depth_and_filters_exactly(tree: Retriever) -> None:
    documents = corpus(2000)
    full = tree.search("query", k=200)
    assert all(tree.search("query", k=k) == full[:k] for k in (1, 10, 100))
    assert [hit.doc_id for hit in tree.search("query", k=201)] == oracle(documents, "query", 201)
    some = [document for document in documents if document.metadata["part"] == 2]
    assert [hit.doc_id for hit in tree.search("query", k=9, where={"part": 2})] == oracle(some, "query", 9)


def test_a_saved_tree_moves_and_searches_as_before(tree: Retriever, tmp_path: Path) -> None:
    tree.save(tmp_path / "first")
    os.rename(tmp_path / "first", tmp_path / "second")
    loaded = load_index(tmp_path / "second", encoder=hashed)
    queries = [f"q{i}" for i in range(30)]
    # Two trees built from the same documents differ, so equality here means that the saved tree itself is loaded.
    assert loaded.search_many(queries) == tree.search_many(queries)


def test_a_planted_pickle_is_refused(tree: Retriever, tmp_path: Path) -> None:
    tree.save(tmp_path / "index")
    (tmp_path / "index" / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="pickle"):
        load_index(tmp_path / "index", encoder=hashed)


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_the_filter_comes_before_the_cut(index: str) -> None:
    documents = corpus(100)
    retriever = build_index(documents, "vector", encoder=hashed, index=index)
    some = [document for document in documents if document.metadata["part"] == 3]
    assert [hit.doc_id for hit in retriever.search("query", k=50, where={"part": 3})] == oracle(some, "query", 50)
    assert retriever.search("query", where={"part": 7}) == []


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_an_empty_collection_is_searched_saved_and_loaded(index: str, tmp_path: Path) -> None:
    retriever = build_index([], "vector", index=index)
    assert retriever.search("norm") == []
    assert retriever.search_many(["norm", "x"]) == [[], []]
    retriever.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search("norm") == []


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_search_many_and_threads_give_what_single_searches_give(index: str) -> None:
    pages = [Document(f"d{row}", f"{('matrix', 'norm', 'solve')[row % 3]} number {row}") for row in range(200)]
    retriever = build_index(pages, "vector", index=index)
    queries = [f"norm of number {i}" for i in range(200)] + [""]
    alone = [retriever.search(query) for query in queries]
    assert retriever.search_many(queries) == alone
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(retriever.search, queries)) == alone


def test_a_query_without_tokens_is_near_to_nothing() -> None:
    no_text = SimpleNamespace(doc_id="b", text="", title="", metadata={})
    assert build_index([Document("a", "norm"), no_text], "vector").search("") == []


def test_a_cpu_without_avx2_is_told_of_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(vector, "_cpu_flags", lambda: frozenset({"sse4_2", "avx"}))
    with pytest.raises(ValueError, match='AVX2.*index="exact"'):
        build_index(corpus(5), "vector", encoder=hashed)
    assert build_index(corpus(5), "vector", encoder=hashed, index="exact").search("query", k=1)


@pytest.mark.parametrize(
    ("machine", "flags", "runs"),
    [
        ("x86_64", frozenset({"avx2"}), True),
        ("AMD64", frozenset({"avx"}), False),
        ("x86_64", None, True),
        ("aarch64", frozenset({"asimd"}), True),
    ],
)
def test_which_cpus_run_scann(machine: str, flags: frozenset[str] | None, runs: bool) -> None:
    assert vector.cpu_runs_scann(machine, flags) is runs


def test_without_scann_the_message_names_exact_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_index(corpus(5), "vector", encoder=hashed).save(tmp_path / "index")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scann" else find(name))
    with pytest.raises(ValueError, match='pip install scann.*index="exact"'):
        build_index(corpus(5), "vector", encoder=hashed)
    with pytest.raises(ValueError, match='index="exact"'):
        load_index(tmp_path / "index", encoder=hashed)


def test_a_callable_encoder_must_be_given_again_and_be_the_same(tmp_path: Path) -> None:
    build_index(corpus(5), "vector", encoder=hashed).save(tmp_path / "index")
    with pytest.raises(ValueError, match=r"load_index\(path, encoder=...\)"):
        load_index(tmp_path / "index")
    with pytest.raises(ValueError, match="another vector"):
        load_index(tmp_path / "index", encoder=lambda texts: -hashed(texts))
    with pytest.raises(ValueError, match="8 dimensions, 33 were expected"):
        load_index(tmp_path / "index", encoder=lambda texts: hashed(texts)[:, :8])
    with pytest.raises(ValueError, match="callable"):
        load_index(tmp_path / "index", encoder="wordllama")
    assert load_index(tmp_path / "index", encoder=hashed).search("query")


def test_a_named_encoder_is_remembered(tmp_path: Path) -> None:
    retriever = build_index([Document("a", "matrix norm"), Document("b", "fourier")], "vector", encoder="wordllama")
    retriever.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search("norms") == retriever.search("norms")
    with pytest.raises(ValueError, match="'wordllama'"):
        load_index(tmp_path / "index", encoder=hashed)


def test_a_query_of_another_dimension_is_refused() -> None:
    width = iter([WIDTH, WIDTH - 1])
    retriever = build_index(corpus(3), "vector", encoder=lambda texts: hashed(texts)[:, : next(width)])
    with pytest.raises(ValueError, match="32 dimensions, 33"):
        retriever.search("query")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": "faiss"}, "scann, exact"),
        ({"encoder": "bert"}, "wordllama"),
        ({"encoder": 3}, "callable"),
        ({"tree_from": 10}, "tree_from.*256"),
        ({"shortlist": 0}, "shortlist"),
        ({"leaves": 2.5}, "leaves"),
        ({"tree_from": 256, "leaves": 400}, "leaves_to_search <= leaves <= 300"),
        ({"stemmer": "english"}, "has no option stemmer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(corpus(300), "vector", **{"encoder": hashed, **options})
