"""A checkpoint at rest, wherever it lies: what its tensors are, each read when it is asked for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor. `read` gives it anew at each call, as an array of this shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint as transformers lays it out.

    Args:
        where: for messages.
        config: what stands in config.json.
        tensors: by their names in the checkpoint.
        files: whatever else a model is served with (tokenizer, chat template, generation config), by file name; each
            gives its bytes.
    """

    where: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, Callable[[], bytes]]

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype that the configuration declares for the weights, if it does.

        Raises:
            ValueError: it declares another than `FLOATS`.
        """
        for part in (self.config, self.config.get("text_config") or {}):
            for key in ("dtype", "torch_dtype"):
                name = str(part.get(key) or "auto").removeprefix("torch.")
                if name not in FLOATS and name != "auto":
                    raise ValueError(
                        f"{self.where}: expected {key} to be one of {', '.join(FLOATS)}, got {part[key]!r}"
                    )
                if name != "auto":
                    return np.dtype(name)
        return None
