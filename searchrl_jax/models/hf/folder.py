"""Folders of checkpoints: read as they stand, written whole or not at all, nothing with pickle."""

import functools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A shard is held in memory while it is written.
SHARD_BYTES = 2_000_000_000

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
# What a model is served with, beside its weights. Code that came with a checkpoint is never run, so it stays behind.
_CARRIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def read_folder(path: Path) -> StoredCheckpoint:
    """The checkpoint in a folder: its config.json and safetensors shards. Only headers are read.

    Raises:
        ValueError: there is no such folder, no config.json, no safetensors, a file is damaged, or two shards hold one
            tensor.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path}: expected a folder with a {CONFIG}; give one, a .gguf file or hf://owner/name")
    tensors: dict[str, StoredTensor] = {}
    for shard in _shards(path):
        found = _tensors(shard)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{path}: expected each tensor in one shard, {', '.join(twice)} is in two; fetch it anew")
        tensors |= found
    files = {
        each.name: each.read_bytes
        for each in sorted(path.iterdir())
        if each.is_file() and each.suffix in _CARRIED and each.name != CONFIG and not each.name.endswith(".index.json")
    }
    return StoredCheckpoint(str(path), _read_json(path / CONFIG), tensors, files)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, but {error}; fetch it anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}; fetch it anew")
    return found


def _shards(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{path / INDEX}: expected a weight_map of tensors and files; fetch it anew")
        shards = [path / name for name in sorted(set(weight_map.values()))]
    else:
        shards = [path / SINGLE]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(
            f"{path}: expected the file {', '.join(missing)}; fetch it, or, where the weights are in another format, "
            "save them as safetensors with transformers first"
        )
    return shards


def _tensors(shard: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            headers = {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{shard}: expected a whole safetensors file, but {error}; fetch it anew") from error
    if unknown := sorted({dtype for _, dtype in headers.values()} - _DTYPES.keys()):
        raise ValueError(f"{shard}: expected tensors of {', '.join(_DTYPES)}, got {', '.join(unknown)}")
    return {
        name: StoredTensor(shape, np.dtype(_DTYPES[dtype]), functools.partial(_read, shard, name))
        for name, (shape, dtype) in headers.items()
    }


def _read(shard: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    # "pread" reads the one tensor; a mapping would count as ours what the system merely caches.
    with safe_open(shard, framework="numpy", backend="pread") as file:
        tensor: np.ndarray = file.get_tensor(name)
    return tensor


def write_tensors(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Writes tensors as safetensors, in shards with an index where they exceed `SHARD_BYTES`; holds one at a time.

    A shard is larger only where a single tensor is.
    """
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= tensor.nbytes
    files = [SINGLE]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: tensors[name] for name in names})


def write_file(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Writes one safetensors file; all its tensors are held at once."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    arrays = {name: np.ascontiguousarray(tensor.read()) for name, tensor in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"})  # transformers asks for this mark
    path.chmod(mode)  # the library's files are their owner's alone to read


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A fresh folder to fill, which becomes `path` on leaving the block, once all in it is on disk.

    An error, or a kill, leaves nothing at `path`; after a kill a folder named `.*.partial` stands beside it.

    Raises:
        ValueError: there is something at `path` that is not an empty folder.
    """
    target = Path(path).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{path}: expected a new or an empty folder, found something there; choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.partial")
    fresh.mkdir()
    try:
        yield fresh
        for each in fresh.iterdir():
            with each.open("rb") as file:
                os.fsync(file.fileno())
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
