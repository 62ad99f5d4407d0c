"""From texts to vectors: static embeddings by name, or any callable, checked."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

Encoder = Callable[[Sequence[str]], Any]
NAMES = ("wordllama",)

# Bounds the memory of one call to the encoder, however large the collection.
BATCH = 1024


def named_encoder(name: str) -> Encoder:
    """The encoder of that name.

    Raises:
        ValueError: no such name, or its package isn't installed.
    """
    if name not in NAMES:
        raise ValueError(
            f"encoder must be a callable from texts to float32 [n, d] or one of {', '.join(NAMES)}; got {name!r}"
        )
    return WordLlamaEncoder()


class WordLlamaEncoder:
    """Mean of a text's static token embeddings, at unit length: float32 [n, 256]; zero for a text without tokens.

        v = sum over tokens of E[token] / count,    out = v / |v|

    Each row depends on its own text alone, bit for bit. The two files come with the `wordllama` package and are read
    without importing it, since importing it sets up logging for the whole process, and its loader looks for a download.
    """

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        spec = importlib.util.find_spec("wordllama")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                'encoder="wordllama" needs the package wordllama: pip install wordllama, or pass a callable encoder'
            )
        folder = Path(spec.submodule_search_locations[0])
        table = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
        self._table = np.ascontiguousarray(table, np.float32)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))

    def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "n 256"]:
        out = np.zeros((len(texts), self._table.shape[1]), np.float32)
        # One text at a time: a batch would start the tokenizer's own threads, which must not meet a fork later.
        for row, text in enumerate(texts):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if ids:
                mean = self._table[ids].mean(axis=0)
                length = np.linalg.norm(mean)
                out[row] = mean / length if length > 0.0 else 0.0
        return out


def encode(encoder: Encoder, texts: Sequence[str], dimension: int | None) -> Float[np.ndarray, "n d"]:
    """`encoder` of all `texts`, in batches, checked.

    Args:
        dimension: the d that must come out; None accepts the first batch's.

    Raises:
        ValueError: the result is not float32 [n, d] of that d, or not finite.
    """
    batches = []
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        vectors = np.asarray(encoder(batch))
        if vectors.ndim != 2 or vectors.shape[0] != len(batch) or vectors.shape[1] == 0:
            raise ValueError(
                f"the encoder must return [n, d]; for {len(batch)} texts it gave the shape {vectors.shape}"
            )
        if vectors.dtype != np.float32:
            raise ValueError(f"the encoder must return float32, it gave {vectors.dtype}; use .astype(numpy.float32)")
        if dimension is not None and vectors.shape[1] != dimension:
            raise ValueError(f"the encoder gave vectors of {vectors.shape[1]} dimensions, {dimension} were expected")
        if not np.isfinite(vectors).all():
            row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise ValueError(f"the encoder gave a vector that isn't finite for the text {batch[row][:80]!r}")
        dimension = vectors.shape[1]
        batches.append(vectors)
    return np.concatenate(batches) if batches else np.zeros((0, dimension or 0), np.float32)
