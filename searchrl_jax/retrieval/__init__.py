"""Search over a collection of documents: BM25, vectors, metadata filters and rank fusion.

An index is built once, saved, and searched from any number of threads:

    index = build_index(documents, kind="bm25")
    hits = index.search("norm of a matrix", k=5, where={"package": ["numpy", "scipy"]})
    index.save("indexes/bm25")
    index = load_index("indexes/bm25")
"""

from searchrl_jax.retrieval.fusion import reciprocal_rank_fusion
from searchrl_jax.retrieval.index import build_index, load_index
from searchrl_jax.retrieval.ranking import Hit, Retriever

__all__ = ["Hit", "Retriever", "build_index", "load_index", "reciprocal_rank_fusion"]
