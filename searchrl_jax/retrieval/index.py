"""Building an index by kind, and loading one of any kind."""

from collections.abc import Iterable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from searchrl_jax.retrieval.bm25 import BM25Index
from searchrl_jax.retrieval.documents import SearchableDocument
from searchrl_jax.retrieval.encoders import Encoder
from searchrl_jax.retrieval.ranking import Retriever
from searchrl_jax.retrieval.storage import read_manifest
from searchrl_jax.retrieval.vector import VectorIndex

KINDS = ("bm25", "vector")


def build_index(documents: Iterable[SearchableDocument], kind: str = "bm25", **options: Any) -> Retriever:
    """An index over the title and text of `documents`.

    Args:
        documents: objects with doc_id, text, title and metadata; ids are unique; there may be none.
        kind: "bm25" or "vector".
        options: those of `BM25Index.build` or `VectorIndex.build`.

    Raises:
        ValueError: an unknown kind or option, an option out of range, or a bad document.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    build = BM25Index.build if kind == "bm25" else VectorIndex.build
    known = [name for name, each in signature(build).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"kind={kind!r} has no option {', '.join(unknown)}; its options are {', '.join(known)}")
    return build(documents, **options)


def load_index(path: str | Path, *, encoder: Encoder | None = None) -> Retriever:
    """The index that `save` wrote to `path`; it searches exactly as the saved one did.

    Args:
        encoder: the callable that a vector index was built with; a named encoder is remembered by its name.

    Raises:
        ValueError: no index at `path`, a damaged one, or an encoder missing, superfluous or other than the index's.
    """
    kind, options, collection = read_manifest(path)
    if kind == "vector":
        return VectorIndex.load(Path(path), options, collection, encoder)
    if kind != "bm25":
        raise ValueError(f"{path} is an index of kind {kind!r}; this code reads {', '.join(KINDS)}")
    if encoder is not None:
        raise ValueError(f"{path} is a BM25 index and takes no encoder")
    return BM25Index.load(Path(path), options, collection)
