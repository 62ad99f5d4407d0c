"""BM25 by bm25s: an eagerly scored sparse index, searched in well under a millisecond for thousands of documents."""

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from searchrl_jax.retrieval.analysis import ENGLISH_STOPWORDS, Analyzer
from searchrl_jax.retrieval.documents import Collection, SearchableDocument, read_collection
from searchrl_jax.retrieval.filters import Where
from searchrl_jax.retrieval.ranking import Hit, best_hits, check_queries, check_query
from searchrl_jax.retrieval.storage import new_index_folder, write_manifest

MATRIX_FOLDER = "bm25s"


def _import_bm25s() -> ModuleType:
    # On import bm25s runs jax.lax.top_k where jax is installed. That starts JAX's backend: it would claim the
    # accelerator in a process that only searches, and make a later jax.distributed.initialize fail. None in sys.modules
    # reads as "not installed", which makes bm25s keep to numpy, all that is used here.
    missing = object()
    before: Any = sys.modules.get("jax.lax", missing)
    sys.modules["jax.lax"] = None  # type: ignore[assignment]
    try:
        import bm25s
    finally:
        if before is missing:
            del sys.modules["jax.lax"]
        else:
            sys.modules["jax.lax"] = before
    # Its logger is set to DEBUG, and speaks up as soon as another library configures logging.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


bm25s = _import_bm25s()


class BM25Index:
    """A BM25 index; see `build`. Documents that share no term with the query are never returned."""

    def __init__(self, collection: Collection, analyzer: Analyzer, options: Mapping[str, Any], matrix: Any) -> None:
        """`matrix` is a bm25s.BM25, or None where no document has a term; `options` are k1 and b."""
        self._collection = collection
        self._analyzer = analyzer
        self._options = dict(options)
        self._matrix = matrix

    @classmethod
    def build(
        cls,
        documents: Iterable[SearchableDocument],
        *,
        k1: float = 1.5,
        b: float = 0.75,
        stemmer: str | None = "english",
        stopwords: Sequence[str] | str | None = "english",
        lead_weight: int = 0,
        lead_words: int = 12,
    ) -> "BM25Index":
        """Index the title and text of `documents`.

        With tf the weighted count of a term in a document, |d| the sum of its tf, and n the number of the N documents
        that hold the term,

            tf          = count in title and text + lead_weight * count in title and first lead_words words of text
            score(q, d) = sum over terms t of q of idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))
            idf(t)      = ln(1 + (N - n + 0.5) / (n + 0.5))

        Args:
            k1: how late repeats of a term saturate; at least 0.
            b: how much long documents are held back; in [0, 1].
            stemmer: a Snowball algorithm, or None to compare words as they are.
            stopwords: "english", your own list, or None.
            lead_weight: how many times more titles and beginnings of texts count, where they say what documents are
                about; 0 for plain BM25.
            lead_words: how many words of a text are its beginning.

        Raises:
            ValueError: a bad document or option.

        Source:
            Robertson and Zaragoza 2009, "The probabilistic relevance framework"; the variant is Lucene's, as in
            Kamphuis et al. 2020 (table 1) and Lù 2024, arXiv:2407.03618. Weighted counts: Robertson, Zaragoza and
            Taylor 2004, "Simple BM25 extension to multiple weighted fields".
        """
        for name, value, highest in (("k1", k1, math.inf), ("b", b, 1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= highest:
                raise ValueError(f"{name} must be a number from 0 to {highest}, got {value!r}")
        for name, count in (("lead_weight", lead_weight), ("lead_words", lead_words)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} must be an integer from 0 on, got {count!r}")
        analyzer = Analyzer(stemmer, _stopword_list(stopwords))
        documents = list(documents)
        collection, texts = read_collection(documents)
        leads = (" ".join([document.title, *document.text.split()[:lead_words]]) for document in documents)
        vocabulary: dict[str, int] = {}
        term_ids = [
            [
                vocabulary.setdefault(term, len(vocabulary))
                for term in [*analyzer.terms(text), *lead_weight * analyzer.terms(lead)]
            ]
            for text, lead in zip(texts, leads, strict=True)
        ]
        matrix = None
        if vocabulary:
            matrix = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")
            matrix.index((term_ids, vocabulary), create_empty_token=False, show_progress=False)
        return cls(collection, analyzer, {"k1": k1, "b": b}, matrix)

    def search(self, query: str, k: int = 10, where: Where | None = None) -> list[Hit]:
        """The best `k` documents that share a term with `query` and satisfy `where`, by (-score, doc_id)."""
        k = check_query(query, k)
        is_admitted = self._collection.metadata.admitted(where)
        term_ids = [] if self._matrix is None else self._matrix.get_tokens_ids(self._analyzer.terms(query))
        if not term_ids:
            return []
        scores = self._matrix.get_scores_from_ids(term_ids)
        matches = scores > 0.0 if is_admitted is None else (scores > 0.0) & is_admitted
        rows = np.flatnonzero(matches)
        return best_hits(self._collection, rows, scores[rows], k)

    def search_many(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """`search` of each query, in order."""
        return [self.search(query, k) for query in check_queries(queries)]

    def save(self, path: str | Path) -> None:
        """Write the index, with its stemmer and stop words, to the folder `path`."""
        options = {
            **self._options,
            "stemmer": self._analyzer.stemmer,
            "stopwords": self._analyzer.stopwords,
            "has_terms": self._matrix is not None,
        }
        with new_index_folder(path) as folder:
            write_manifest(folder, "bm25", options, self._collection)
            if self._matrix is not None:
                self._matrix.save(folder / MATRIX_FOLDER, show_progress=False)

    @classmethod
    def load(cls, path: Path, options: Mapping[str, Any], collection: Collection) -> "BM25Index":
        """The index in the folder `path`, whose manifest has been read."""
        analyzer = Analyzer(options["stemmer"], options["stopwords"])
        matrix = None
        if options["has_terms"]:
            try:
                matrix = bm25s.BM25.load(path / MATRIX_FOLDER, allow_pickle=False, show_progress=False)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is a damaged index ({error}); build it again") from error
            if matrix.scores["num_docs"] != len(collection):
                raise ValueError(
                    f"{path} is a damaged index: {matrix.scores['num_docs']} scored documents, {len(collection)} ids; "
                    "build it again"
                )
        return cls(collection, analyzer, {"k1": options["k1"], "b": options["b"]}, matrix)


def _stopword_list(stopwords: Sequence[str] | str | None) -> Sequence[str]:
    if stopwords is None:
        return ()
    if isinstance(stopwords, str):
        if stopwords != "english":
            raise ValueError(f'stopwords must be "english", a list of words or None, got the string {stopwords!r}')
        return ENGLISH_STOPWORDS
    if not all(isinstance(word, str) for word in stopwords):
        raise ValueError("stopwords must all be strings")
    return stopwords
