"""BM25: an independent oracle, the order of hits, filters, threads, and each public fault of BM25 search."""

import math
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from searchrl_jax.data.schema import Document
from searchrl_jax.retrieval import build_index, load_index
from searchrl_jax.retrieval.analysis import ENGLISH_STOPWORDS, Analyzer
from searchrl_jax.retrieval.bm25 import BM25Index

WORDS = [
    "matrix",
    "vector",
    "norm",
    "solve",
    "sparse",
    "eigen",
    "value",
    "fourier",
    "window",
    "running",
    "runs",
    "runner",
]


def empty(doc_id: str) -> SimpleNamespace:
    """A document without text, which `Document` refuses but a caller's own type may hold."""
    return SimpleNamespace(doc_id=doc_id, text="", title="", metadata={})


def corpus(count: int, seed: int = 0) -> list[Document]:
    rng = random.Random(seed)
    return [
        Document(f"d{row:03}", " ".join(rng.choices(WORDS, k=rng.randint(1, 30))), metadata={"part": row % 3})
        for row in range(count)
    ]


def test_scores_equal_the_formula() -> None:
    documents = corpus(50)
    k1, b = 0.9, 0.4
    terms = {d.doc_id: Analyzer("english", ENGLISH_STOPWORDS).terms(d.text) for d in documents}
    mean_length = sum(map(len, terms.values())) / len(terms)
    query = ["norm", "run", "norm", "fourier"]
    expected = {}
    for doc_id, words in terms.items():
        counts = Counter(words)
        score = 0.0
        for term in query:
            n = sum(term in other for other in terms.values())
            idf = math.log(1 + (len(terms) - n + 0.5) / (n + 0.5))
            score += idf * counts[term] / (counts[term] + k1 * (1 - b + b * len(words) / mean_length))
        if score > 0:
            expected[doc_id] = score
    hits = build_index(documents, "bm25", k1=k1, b=b).search("norms running norm Fourier", k=50)
    assert {hit.doc_id: hit.score for hit in hits} == pytest.approx(expected, rel=1e-5)
    assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.doc_id))


def test_title_and_parts_of_identifiers_are_found() -> None:
    index = build_index([Document("a", "length of a vector", "numpy.linalg.norm"), Document("b", "BatchNorm layer")])
    assert {hit.doc_id for hit in index.search("norm")} == {"a", "b"}
    assert [hit.doc_id for hit in index.search("batch norm")] == ["b", "a"]
    assert index.search("numpy.linalg.norm")[0].doc_id == "a"


@pytest.mark.parametrize("query", ["the of", "", "   ", "zzzz", "?!"])
def test_a_query_without_known_terms_returns_nothing(query: str) -> None:
    assert build_index(corpus(8)).search(query, k=3) == []


def test_documents_without_a_common_term_are_not_returned() -> None:
    index = build_index([Document("a", "norm"), Document("b", "fourier"), Document("c", "norm window")])
    assert [hit.doc_id for hit in index.search("norm", k=10)] == ["a", "c"]


def test_k_beyond_the_collection() -> None:
    documents = [Document(doc_id, "matrix norm") for doc_id in ("a", "b", "c")]
    assert [hit.doc_id for hit in build_index(documents).search("norm", k=10)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "documents", [[], [empty("a"), empty("b")], [Document("b", "the of")]], ids=["none", "empty", "no terms"]
)
def test_an_empty_collection_is_searched_saved_and_loaded(documents: list[Any], tmp_path: Path) -> None:
    index = build_index(documents)
    assert index.search("norm") == []
    index.save(tmp_path / "index")
    assert load_index(tmp_path / "index").search("norm") == []


def test_an_empty_document_beside_others_is_never_returned() -> None:
    index = build_index([empty("a"), Document("b", "norm")])
    assert [hit.doc_id for hit in index.search("norm")] == ["b"]


@pytest.mark.parametrize(("text", "query"), [("我去过黄山", "黄山"), ("我去过黄山", "山"), ("東京タワーへ", "タワー")])
def test_chinese_and_japanese_clauses_are_found_by_their_parts(text: str, query: str) -> None:
    hits = build_index([Document("a", text), Document("b", "今天天气很好")]).search(query)
    assert [hit.doc_id for hit in hits] == ["a"]
    assert hits[0].score > 0


def test_ties_are_ordered_by_id_and_each_top_is_a_prefix_of_a_deeper_one() -> None:
    documents = [Document(f"d{row}", "norm") for row in (5, 2, 7, 0, 3, 1, 6, 4)] + corpus(40)
    index = build_index(documents)
    assert [hit.doc_id for hit in build_index(documents[:8]).search("norm", k=3)] == ["d0", "d1", "d2"]
    for query in ("norm", "norm fourier", "running"):
        deepest = index.search(query, k=100)
        assert all(index.search(query, k=k) == deepest[:k] for k in range(1, 49))


def test_stemmer_and_stop_words_are_saved(tmp_path: Path) -> None:
    documents = [*corpus(30), Document("de", "die Häuser")]
    for number, options in enumerate(({}, {"stemmer": "german", "stopwords": ["die"]}, {"stemmer": None})):
        index = build_index(documents, "bm25", **options)
        index.save(tmp_path / str(number))
        loaded = load_index(tmp_path / str(number))
        for query in ("running", "the norm", "Haus", "die", "vocabulary beyond the index"):
            assert loaded.search(query, k=30) == index.search(query, k=30)
    assert [hit.doc_id for hit in load_index(tmp_path / "1").search("haus")] == ["de"]
    assert load_index(tmp_path / "1").search("die") == []


def test_the_filter_comes_before_the_cut() -> None:
    index = build_index(corpus(60))
    everything = index.search("norm fourier", k=60)
    for part in range(3):
        kept = [hit for hit in everything if int(hit.doc_id[1:]) % 3 == part]
        assert index.search("norm fourier", k=5, where={"part": part}) == kept[:5]
    assert index.search("norm", where={"part": 9}) == []


def test_search_many_is_search_row_by_row() -> None:
    index = build_index(corpus(40))
    queries = ["norm", "", "solve sparse", "the", "我"]
    assert index.search_many(queries, 7) == [index.search(query, 7) for query in queries]
    assert index.search_many([], 7) == []


def test_threads_get_what_one_thread_gets() -> None:
    index = build_index(corpus(100))
    # Words long and distinct enough that a stemmer shared by threads would mix them up.
    queries = [
        f"{'un' * (i % 7)}{WORDS[i % len(WORDS)]}ingly {WORDS[-1 - i % len(WORDS)]}ations norm" for i in range(400)
    ]
    alone = index.search_many(queries)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(index.search, queries)) == alone


def test_importing_retrieval_does_not_import_jax() -> None:
    program = "import searchrl_jax.retrieval, sys; assert not [m for m in sys.modules if m.split('.')[0] == 'jax']"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_jax_still_imports_afterwards() -> None:
    program = "import searchrl_jax.retrieval, jax.lax; assert jax.lax.add is not None"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -1.0}, "k1"),
        ({"b": 1.5}, "b must be"),
        ({"stemmer": "klingon"}, "stemmer"),
        ({"stopwords": "german"}, "stopwords"),
        ({"k_1": 1.0}, "has no option k_1; its options are k1, b, stemmer, stopwords"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index([], "bm25", **options)


@pytest.mark.parametrize(
    ("query", "k", "message"),
    [("norm", 0, "at least 1"), ("norm", 2.5, "at least 1"), ("norm", True, "at least 1"), (None, 3, "query")],
)
def test_bad_searches_are_refused(query: str, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(corpus(3)).search(query, k)
    with pytest.raises(ValueError, match="one string"):
        build_index(corpus(3)).search_many("norm")


def test_a_weighted_lead_counts_as_often_as_if_it_were_repeated() -> None:
    texts = {"a": "red fruit of a tree " + "blue " * 9, "b": "blue water red fruit red fruit", "c": "a tree"}
    plain = [Document(doc_id, text, doc_id) for doc_id, text in texts.items()]
    leads = {d.doc_id: f" {d.title} " + " ".join(d.text.split()[:2]) for d in plain}
    repeated = [Document(d.doc_id, d.text + leads[d.doc_id] * 3, d.title) for d in plain]
    weighted = BM25Index.build(plain, lead_weight=3, lead_words=2)
    for query in ("red fruit", "blue tree", "water"):
        assert weighted.search(query) == BM25Index.build(repeated).search(query)
    assert weighted.search("red fruit")[0].doc_id == "a" != BM25Index.build(plain).search("red fruit")[0].doc_id


@pytest.mark.parametrize("option", [{"lead_weight": -1}, {"lead_weight": 1.5}, {"lead_words": True}])
def test_bad_leads_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be an integer from 0 on"):
        BM25Index.build([], **option)
