"""A checkpoint at rest, wherever it lies: what its tensors are, each read when it is asked for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


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
        """The dtype that the configuration declares for the weights, if it does."""
        for part in (self.config, self.config.get("text_config", {})):
            for key in ("dtype", "torch_dtype"):
                if part.get(key):
                    return np.dtype(part[key])
        return None
