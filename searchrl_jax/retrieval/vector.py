"""Vector search: exact in numpy, or ScaNN."""

import importlib.util
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from searchrl_jax.retrieval.documents import Collection, SearchableDocument, read_collection
from searchrl_jax.retrieval.encoders import Encoder, encode, named_encoder
from searchrl_jax.retrieval.filters import Where
from searchrl_jax.retrieval.ranking import Hit, best_hits, check_queries, check_query
from searchrl_jax.retrieval.storage import new_index_folder, write_manifest

INDEXES = ("scann", "exact")
VECTORS_FILE = "vectors.npy"
TREE_FOLDER = "scann"

# A tree is trained on the documents: ScaNN fails below 16 of them, and is no faster than brute force for long after.
FEWEST_FOR_TREE = 256
# Float32 sums of ScaNN and numpy differ by less than this, relative to |query| * max |document|.
ROUNDING = 1e-5


class VectorIndex:
    """A vector index; see `build`. Scores are inner products of query and document vectors."""

    def __init__(
        self,
        collection: Collection,
        vectors: Float[np.ndarray, "N d"],
        encoder: Encoder,
        options: Mapping[str, Any],
        searcher: Any,
    ) -> None:
        """`searcher` is a ScaNN searcher, or None for exact search; `options` are those of `build` and the probe."""
        self._collection = collection
        self._vectors = vectors
        self._encoder = encoder
        self._options = dict(options)
        self._searcher = searcher
        self._longest = float(np.sqrt(np.einsum("nd,nd->n", vectors, vectors).max(initial=0.0)))

    @classmethod
    def build(
        cls,
        documents: Iterable[SearchableDocument],
        *,
        encoder: str | Encoder = "wordllama",
        index: str = "scann",
        tree_from: int = 20_000,
        leaves: int | None = None,
        leaves_to_search: int | None = None,
        shortlist: int = 200,
    ) -> "VectorIndex":
        """Index the title and text of `documents` by their vectors.

        ScaNN searches all vectors below `tree_from` documents, and the results are the exact ones. From there on it
        searches the nearest leaves of a tree, by quantised scores, and hands over a shortlist, which is scored exactly;
        so only which documents reach the shortlist is approximate. Searches that a shortlist cannot serve score every
        admitted document exactly: those with `where`, those deeper than the shortlist, and those for which the searched
        leaves cannot fill it.

        Two trees built from the same documents differ. To repeat a search, save the index and load it.

        Args:
            encoder: "wordllama", or a callable from a list of texts to float32 [n, d]. It is called on the threads
                that search. For cosine similarity it must return unit vectors.
            index: "scann", or "exact" for numpy alone.
            tree_from: at least 256.
            leaves: of the tree; None is the square root of the number of documents.
            leaves_to_search: None is a tenth of the leaves.
            shortlist: hits that ScaNN hands over; at least 1.

        Raises:
            ValueError: a bad document, option or encoder; or ScaNN cannot run on this machine.

        Source:
            Guo et al. 2020, arXiv:1908.10396.
        """
        if index not in INDEXES:
            raise ValueError(f"index must be one of {', '.join(INDEXES)}, got {index!r}")
        _check_sizes(tree_from, leaves, leaves_to_search, shortlist)
        if index == "scann":
            require_scann()
        collection, texts = read_collection(documents)
        encode_texts = named_encoder(encoder) if isinstance(encoder, str) else encoder
        if not callable(encode_texts):
            raise ValueError(f"encoder must be a name or a callable from texts to float32 [n, d], got {encoder!r}")
        vectors = np.ascontiguousarray(encode(encode_texts, texts, None))
        searcher, is_tree = None, False
        if index == "scann" and len(collection):
            is_tree = len(collection) >= tree_from
            if is_tree:
                searcher = _build_tree(vectors, leaves, leaves_to_search, shortlist)
            else:
                searcher = _build_brute_force(vectors)
        options = {
            "encoder": encoder if isinstance(encoder, str) else None,
            "index": index,
            "is_tree": is_tree,
            "shortlist": shortlist,
            # Lets `load` notice an encoder other than the one that made the vectors.
            "probe": texts[0] if texts else None,
        }
        return cls(collection, vectors, encode_texts, options, searcher)

    def search(self, query: str, k: int = 10, where: Where | None = None) -> list[Hit]:
        """The `k` documents nearest to `query` that satisfy `where`, by (-score, doc_id).

        A query whose vector is zero (with "wordllama", one without tokens) is near to nothing and returns no hits.
        """
        k = check_query(query, k)
        is_admitted = self._collection.metadata.admitted(where)
        if not len(self._collection):
            return []
        (vector,) = self._encode([query])
        rows = None if is_admitted is None else np.flatnonzero(is_admitted)
        return self._nearest(vector, k, rows)

    def search_many(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """`search` of each query, in order; the encoder sees them together."""
        texts = check_queries(queries)
        k = check_query("", k)
        if not len(self._collection):
            return [[] for _ in texts]
        return [self._nearest(vector, k, None) for vector in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        return np.ascontiguousarray(encode(self._encoder, texts, self._vectors.shape[1]))

    def _nearest(self, vector: Float[np.ndarray, " d"], k: int, rows: Int[np.ndarray, " n"] | None) -> list[Hit]:
        if not vector.any():
            return []
        if rows is None and self._searcher is not None:
            rows = self._shortlist(vector, k) if self._options["is_tree"] else self._brute_force_rows(vector, k)
        if rows is None:
            rows = np.arange(len(self._collection))
            vectors = self._vectors
        else:
            vectors = self._vectors[rows]
        # einsum sums each row on its own, so equal vectors score equally in any row; BLAS doesn't promise that.
        return best_hits(self._collection, rows, np.einsum("nd,d->n", vectors, vector), k)

    def _shortlist(self, vector: Float[np.ndarray, " d"], k: int) -> Int[np.ndarray, " n"] | None:
        # Always the whole shortlist, whatever k, or the top 5 need not be a prefix of the top 10.
        if k > self._options["shortlist"]:
            return None
        rows, scores = self._searcher.search(vector, final_num_neighbors=self._options["shortlist"])
        rows = rows[np.isfinite(scores)].astype(np.int64)
        return rows if len(rows) == min(self._options["shortlist"], len(self._collection)) else None

    def _brute_force_rows(self, vector: Float[np.ndarray, " d"], k: int) -> Int[np.ndarray, " n"]:
        # ScaNN cuts ties by row. Ask for more until the last is clearly worse than the k-th, so that the ids decide.
        count = len(self._collection)
        margin = ROUNDING * self._longest * float(np.linalg.norm(vector))
        wanted = min(k + 16, count)
        while True:
            # k > N would be padded with row 0 and NaN, so never ask for more than there are.
            rows, scores = self._searcher.search(vector, final_num_neighbors=wanted)
            if wanted == count or scores[-1] < scores[k - 1] - margin:
                return rows.astype(np.int64)
            wanted = min(2 * wanted, count)

    def save(self, path: str | Path) -> None:
        """Write the index to the folder `path`: vectors, the tree if there is one, the encoder's name if it has one."""
        with new_index_folder(path) as folder:
            write_manifest(folder, "vector", self._options, self._collection)
            np.save(folder / VECTORS_FILE, self._vectors, allow_pickle=False)
            if self._options["is_tree"]:
                (folder / TREE_FOLDER).mkdir()
                # Absolute paths, ScaNN's default, would break the index when its folder moves.
                self._searcher.serialize(str(folder / TREE_FOLDER), relative_path=True)

    @classmethod
    def load(
        cls, path: Path, options: Mapping[str, Any], collection: Collection, encoder: Encoder | None
    ) -> "VectorIndex":
        """The index in the folder `path`, whose manifest has been read."""
        name = options["encoder"]
        if name is not None:
            if encoder is not None and encoder != name:
                raise ValueError(f"{path} was built with the encoder {name!r}; load it without another one")
            encode_texts = named_encoder(name)
        elif callable(encoder):
            encode_texts = encoder
        else:
            raise ValueError(
                f"{path} was built with a callable encoder, not stored; pass it: load_index(path, encoder=...); "
                f"got {encoder!r}"
            )
        if options["index"] == "scann":
            require_scann()
        try:
            vectors = np.load(path / VECTORS_FILE, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is a damaged index ({error}); build it again") from error
        if vectors.ndim != 2 or len(vectors) != len(collection) or vectors.dtype != np.float32:
            raise ValueError(
                f"{path} is a damaged index: {vectors.dtype} {vectors.shape} vectors for {len(collection)} ids; "
                "build it again"
            )
        if options["probe"] is not None:
            probe = encode(encode_texts, [options["probe"]], vectors.shape[1])
            # Loose, since batching and other hardware may round differently; another model is off by far more.
            if np.linalg.norm(probe[0] - vectors[0]) > 0.05 * np.linalg.norm(vectors[0]):
                raise ValueError(
                    f"the encoder gives the first document of {path} another vector than the one stored, so it isn't "
                    "the encoder the index was built with; pass that one or build the index again"
                )
        searcher = None
        if options["is_tree"]:
            searcher = _load_tree(path / TREE_FOLDER)
        elif options["index"] == "scann" and len(collection):
            searcher = _build_brute_force(vectors)
        return cls(collection, vectors, encode_texts, options, searcher)


def require_scann() -> None:
    """Refuse a machine that ScaNN cannot run on.

    Raises:
        ValueError: the package is missing, or an x86 CPU lacks AVX2, so that ScaNN would die of an illegal instruction.
    """
    instead = 'use index="exact", which searches all vectors with numpy and gives the exact results'
    if importlib.util.find_spec("scann") is None:
        raise ValueError(
            f'index="scann" needs the package scann, which has no wheel for every platform '
            f"(this is {platform.system()} {platform.machine()}): pip install scann, or {instead}"
        )
    if not cpu_runs_scann(platform.machine(), _cpu_flags()):
        raise ValueError(f'index="scann" needs a CPU with AVX2, which this one lacks: {instead}')


def cpu_runs_scann(machine: str, flags: frozenset[str] | None) -> bool:
    """False on an x86 CPU known to lack AVX2. `flags` is None where the system doesn't list them."""
    return machine.lower() not in ("x86_64", "amd64") or flags is None or "avx2" in flags


def _cpu_flags() -> frozenset[str] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return None


def _check_sizes(tree_from: int, leaves: int | None, leaves_to_search: int | None, shortlist: int) -> None:
    for name, value, least in (
        ("tree_from", tree_from, FEWEST_FOR_TREE),
        ("leaves", leaves, 1),
        ("leaves_to_search", leaves_to_search, 1),
        ("shortlist", shortlist, 1),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _builder(vectors: Float[np.ndarray, "N d"], neighbours: int) -> Any:
    from scann import scann_ops_pybind

    return scann_ops_pybind.builder(vectors, neighbours, "dot_product")


def _build_brute_force(vectors: Float[np.ndarray, "N d"]) -> Any:
    return _builder(vectors, 1).score_brute_force().build()


def _build_tree(
    vectors: Float[np.ndarray, "N d"], leaves: int | None, leaves_to_search: int | None, shortlist: int
) -> Any:
    count = len(vectors)
    leaves = round(math.sqrt(count)) if leaves is None else leaves
    leaves_to_search = math.ceil(leaves / 10) if leaves_to_search is None else leaves_to_search
    if leaves > count or leaves_to_search > leaves:
        raise ValueError(
            f"a tree over {count} documents needs leaves_to_search <= leaves <= {count}, "
            f"got {leaves_to_search} and {leaves}"
        )
    return (
        _builder(vectors, shortlist)
        .tree(num_leaves=leaves, num_leaves_to_search=leaves_to_search, training_sample_size=min(count, 250_000))
        # Two dimensions a block and the threshold 0.2 are the settings of the ScaNN authors' own example.
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(shortlist)
        .build()
    )


def _load_tree(folder: Path) -> Any:
    from scann import scann_ops_pybind

    # ScaNN would unpickle a file of document ids if it found one. We write none, so one that is there was planted.
    pickles = sorted(file.name for file in folder.glob("*.pkl"))
    if pickles:
        raise ValueError(f"{folder} holds {', '.join(pickles)}; an index of this package has no pickle: build it again")
    try:
        return scann_ops_pybind.load_searcher(str(folder), assets_backcompat_shim=False)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} is a damaged ScaNN index ({error}); build it again") from error
