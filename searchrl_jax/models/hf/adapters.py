"""Adapters into folders that PEFT, vLLM and SGLang load beside the base."""

import json
from pathlib import Path

from flax.traverse_util import flatten_dict

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf.config import PretrainedConfig
from searchrl_jax.models.hf.families import complete, family_of
from searchrl_jax.models.hf.folder import new_folder, write_file
from searchrl_jax.models.hf.save import origin_of, stored_element
from searchrl_jax.models.hf.stored import StoredTensor
from searchrl_jax.models.hf.table import LINEAR, rows_of
from searchrl_jax.models.lora import Adapters

# PEFT wraps the model twice.
_PREFIX = "base_model.model."


def save_adapters(path: str | Path, config: DecoderConfig, adapters: Adapters, alpha: float) -> None:
    """Writes adapters in PEFT's format. The folder is there whole or not at all.

    Args:
        path: a folder that isn't there yet, or is empty.
        config: of the base.
        adapters: of `models.lora.init_adapters`, B as it is there: not yet scaled.
        alpha: of the scale alpha / rank that they were trained with.

    Raises:
        ValueError: `path` is in use, the base's source is gone, or an adapted matrix is not a matrix of its own there.
    """
    origin = origin_of(config)
    table = {entry.ours: entry for entry in family_of(origin.config).table(complete(origin.config))}
    tensors: dict[str, StoredTensor] = {}
    for name, array in flatten_dict(adapters, sep="/").items():
        target, _, part = name.rpartition("/")
        if target not in table or table[target].layout is not LINEAR:
            raise ValueError(f"expected adapters of matrices that the checkpoint has singly, got {target}; merge them")
        for row in rows_of([table[target]], {target: array.shape}):
            stem = row.name.removesuffix(".weight")
            tensors[f"{_PREFIX}{stem}.lora_{part.upper()}.weight"] = stored_element(row, array)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight")}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.source if isinstance(config, PretrainedConfig) else None,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(path) as folder:
        (folder / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        write_file(folder / "adapter_model.safetensors", tensors)
