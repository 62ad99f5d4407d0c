"""Adapters into folders that PEFT, vLLM and SGLang load beside the base."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf.config import PretrainedConfig
from searchrl_jax.models.hf.folder import new_folder, write_file
from searchrl_jax.models.hf.layout import LINEAR, STACKED, STACKED_BY_HEAD
from searchrl_jax.models.hf.save import origin_of
from searchrl_jax.models.hf.stored import StoredTensor
from searchrl_jax.models.hf.table import Row
from searchrl_jax.models.lora import Adapters

# PEFT wraps the model twice.
_PREFIX = "base_model.model."


def save_adapters(path: str | Path, config: DecoderConfig, adapters: Adapters, alpha: float) -> None:
    """Writes adapters in PEFT's format. The folder is there whole or not at all.

    Where several of our matrices are stored as one, so are their adapters, exactly: those of n matrices become one of
    n times the rank, whose B is 0 where a matrix reads another's A; `rank_pattern` says so. The names are those of the
    checkpoint: where the text is one part of it, the class that loads all parts (AutoModelForImageTextToText) finds
    them, and AutoModelForCausalLM may not.

    Args:
        path: a folder that isn't there yet, or is empty.
        config: of the base.
        adapters: of `models.lora.init_adapters`, B as it is there: not yet scaled.
        alpha: of the scale alpha / rank that they were trained with.

    Raises:
        ValueError: `path` is in use, the base's source is gone, or it has no such matrix.
    """
    (_, model), flat = origin_of(config), flatten_dict(adapters, sep="/")
    targets = {name.rpartition("/")[0] for name in flat}
    rows = [
        row
        for row in model.rows
        if row.layout in (LINEAR, STACKED, STACKED_BY_HEAD) and not targets.isdisjoint(row.paths)
    ]
    if without := sorted(targets - {name for row in rows for name in row.paths}):
        raise ValueError(f"expected adapters of matrices that the checkpoint has, got {', '.join(without)} as well")
    tensors: dict[str, StoredTensor] = {}
    ranks: dict[str, int] = {}
    for row in rows:
        stem = row.name.removesuffix(".weight")
        a, b = _pair(row, flat, model.shapes)
        tensors |= {f"{_PREFIX}{stem}.lora_A.weight": _tensor(a), f"{_PREFIX}{stem}.lora_B.weight": _tensor(b)}
        ranks[stem.split(".")[-1]] = len(a)
    rank = flat[f"{min(targets)}/a"].shape[-1]
    other = {name: each for name, each in ranks.items() if each != rank}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.source if isinstance(config, PretrainedConfig) else None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": other,
        "alpha_pattern": {name: alpha * each / rank for name, each in other.items()},
        "target_modules": _targets(rows, sorted(ranks)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(path) as folder:
        (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        write_file(folder / "adapter_model.safetensors", tensors)


def _targets(rows: Sequence[Row], names: list[str]) -> list[str] | str:
    """What PEFT is to adapt: modules by their last names or, beside a vision tower that has the same, by a pattern."""
    is_inside = all(".language_model." in row.name for row in rows)
    return rf".*\.language_model\..*\.({'|'.join(names)})" if is_inside else names


def _pair(row: Row, flat: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """torch's A [rank, in] and B [out, rank] of a row."""
    (layer,) = row.index
    adapted = [name for name in row.paths if f"{name}/a" in flat]
    a = np.concatenate([np.asarray(flat[f"{name}/a"][layer]) for name in adapted], axis=-1)
    parts, at = [], 0
    for name in row.paths:
        part = np.zeros((a.shape[-1], *shapes[name][2:]), a.dtype)
        if name in adapted:
            own = np.asarray(flat[f"{name}/b"][layer])
            part[at : at + len(own)] = own
            at += len(own)
        parts.append(part)
    return a.T, np.asarray(row.layout.theirs(*parts))


def _tensor(array: np.ndarray) -> StoredTensor:
    return StoredTensor(array.shape, array.dtype, lambda: array)
