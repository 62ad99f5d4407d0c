"""Parameters into folders that transformers, vLLM and SGLang load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params
from searchrl_jax.models.hf import dense
from searchrl_jax.models.hf.config import PretrainedConfig, pretrained_config
from searchrl_jax.models.hf.folder import CONFIG, new_folder, write_tensors
from searchrl_jax.models.hf.load import open_checkpoint
from searchrl_jax.models.hf.outline import Outline, outline
from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor
from searchrl_jax.models.hf.table import Row


def save_pretrained(path: str | Path, config: DecoderConfig, params: Params) -> None:
    """Writes a folder with the weights, in the dtypes that they have, and all that came with them at their source.

    That is config.json, tokenizer, chat template, generation config, and tensors that were not read (a vision tower).
    A configuration without a source, as of a decoder trained from nothing, brings weights and config.json alone. The
    folder is there whole or not at all.

    Args:
        path: a folder that isn't there yet, or is empty.
        config: of `load_pretrained`, or a decoder's of a family that others know (llama, qwen2, qwen3).
        params: full parameters; adapters are merged into them first (`models.lora.merge`), or saved by themselves
            (`save_adapters`).

    Raises:
        ValueError: `path` is in use, the parameters aren't those of `config`, the source is gone or is of another
            configuration, or no other program could load the model.
    """
    origin, model = origin_of(config)
    arrays = flatten_dict(params, sep="/")
    _check(arrays, model)
    dtype = arrays["embedding"].dtype
    tensors = {row.name: _stored(row, [arrays[name] for name in row.paths], dtype, origin) for row in model.rows}
    tensors |= {name: each for name, each in origin.tensors.items() if name.startswith(model.carried)}
    with new_folder(path) as folder:
        described = json.dumps(_of_dtype(origin.config, dtype), indent=2)
        (folder / CONFIG).write_text(described + "\n", encoding="utf-8")
        for name, read in origin.files.items():
            (folder / name).write_bytes(read())
        write_tensors(folder, tensors)


def origin_of(config: DecoderConfig) -> tuple[StoredCheckpoint, Outline]:
    """The checkpoint that a configuration was loaded from; one of a config.json alone where it has no source.

    Raises:
        ValueError: the source is gone or describes another decoder, or no family describes the configuration.
    """
    if not isinstance(config, PretrainedConfig):
        described = dense.describe(config)
        return StoredCheckpoint("a decoder trained from nothing", described, {}, {}), outline(described)
    origin = open_checkpoint(config.source)
    model = outline(origin.config)
    if pretrained_config(model.decoder, config.source) != config:
        raise ValueError(
            f"{config.source}: expected the configuration {config}, which was loaded from there, but it describes "
            f"{model.decoder}; save with the configuration that load_pretrained gave"
        )
    return origin, model


def _check(arrays: Mapping[str, Any], model: Outline) -> None:
    shapes = model.shapes
    may_be_wide = {name for row in model.rows for name in row.paths if row.may_be_wide or not row.layout.is_exact}
    faults = [f"missing {name}" for name in shapes if name not in arrays]
    faults += [f"extra {name}" for name in arrays if name not in shapes]
    for name in arrays.keys() & shapes.keys():
        shape, dtype, want = arrays[name].shape, arrays[name].dtype, arrays.get("embedding", arrays[name]).dtype
        if shape != shapes[name]:
            faults.append(f"misshaped {name}: expected {list(shapes[name])}, got {list(shape)}")
        if dtype != want and not (name in may_be_wide and dtype == np.float32):
            faults.append(f"mistyped {name}: expected {want}, as the embedding, got {dtype}")
    if faults:
        listed = "\n  ".join(sorted(faults))
        raise ValueError(
            "expected the full parameters of the configuration; merge adapters first, or give the configuration that "
            f"the parameters came with:\n  {listed}"
        )


def _stored(row: Row, arrays: Sequence[jax.Array], dtype: np.dtype, origin: StoredCheckpoint) -> StoredTensor:
    """The tensor that a row's arrays are stored as; its elements alone leave the devices when it's read."""
    layout = row.layout

    def read() -> np.ndarray:
        pieces = [np.asarray(jax.device_get(array[row.index])) for array in arrays]
        stored = np.asarray(layout.theirs(*pieces))
        if layout.is_exact:
            return stored
        before = origin.tensors[row.name].read()
        is_unchanged = layout.ours(before, pieces[0].shape)[0] == pieces[0]
        return np.where(is_unchanged, before.astype(dtype), stored.astype(dtype))

    return StoredTensor(row.shape, np.dtype(arrays[0].dtype) if layout.is_exact else np.dtype(dtype), read)


def _of_dtype(config: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """`config` that declares this dtype of its weights."""
    changed = dict(config)
    parts = [changed]
    if "text_config" in config:
        changed["text_config"] = dict(config["text_config"])
        parts.append(changed["text_config"])
    for part in parts:
        if "torch_dtype" in part:
            part["torch_dtype"] = str(dtype)
        if "dtype" in part:
            part["dtype"] = str(dtype)
    if StoredCheckpoint("", changed, {}, {}).dtype is None:
        changed["dtype"] = str(dtype)
    return changed
