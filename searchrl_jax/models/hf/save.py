"""Parameters into folders that transformers, vLLM and SGLang load."""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params
from searchrl_jax.models.hf import dense
from searchrl_jax.models.hf.config import PretrainedConfig, pretrained_config
from searchrl_jax.models.hf.families import complete, family_of
from searchrl_jax.models.hf.folder import CONFIG, new_folder, write_tensors
from searchrl_jax.models.hf.load import open_checkpoint, parameter_shapes
from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor
from searchrl_jax.models.hf.table import Row, rows_of


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
    origin = origin_of(config)
    family = family_of(origin.config)
    shapes = {name: each.shape for name, each in parameter_shapes(config).items()}
    rows = rows_of(family.table(complete(origin.config)), shapes)
    arrays = flatten_dict(params, sep="/")
    _check(arrays, shapes, may_be_wide={row.path for row in rows if row.may_be_wide})
    tensors = {row.name: stored_element(row, arrays[row.path]) for row in rows}
    tensors |= {name: each for name, each in origin.tensors.items() if name.startswith(family.carried)}
    with new_folder(path) as folder:
        described = json.dumps(_of_dtype(origin.config, arrays["embedding"].dtype), indent=2)
        (folder / CONFIG).write_text(described + "\n", encoding="utf-8")
        for name, read in origin.files.items():
            (folder / name).write_bytes(read())
        write_tensors(folder, tensors)


def origin_of(config: DecoderConfig) -> StoredCheckpoint:
    """The checkpoint that a configuration was loaded from; one of a config.json alone where it has no source.

    Raises:
        ValueError: the source is gone or describes another decoder, or no family describes the configuration.
    """
    if not isinstance(config, PretrainedConfig):
        return StoredCheckpoint("a decoder trained from nothing", dense.describe(config), {}, {})
    origin = open_checkpoint(config.source)
    described = family_of(origin.config).decoder_config(complete(origin.config))
    if pretrained_config(described, config.source) != config:
        raise ValueError(
            f"{config.source}: expected the configuration {config}, which was loaded from there, but it describes "
            f"{described}; save with the configuration that load_pretrained gave"
        )
    return origin


def _check(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], may_be_wide: Set[str]) -> None:
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


def stored_element(row: Row, array: jax.Array) -> StoredTensor:
    """The tensor that element `row.index` of an array is stored as; it alone leaves the devices when it's read."""
    return StoredTensor(row.shape, np.dtype(array.dtype), lambda: row.layout.theirs(jax.device_get(array[row.index])))


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
