"""The families of checkpoints that are read and written, by the `model_type` of their config.json."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf import dense, experts, gemma4, qwen3_5
from searchrl_jax.models.hf.mxfp4 import dequantised
from searchrl_jax.models.hf.stored import StoredCheckpoint
from searchrl_jax.models.hf.table import Entry


@dataclass(frozen=True)
class Family:
    """What must be known of a family, beside the decoder itself.

    Args:
        decoder_config: the decoder that a complete config.json describes.
        table: names and layouts of its tensors.
        carried: beginnings of the names of tensors that are neither read nor changed. They go from the source into
            what is saved.
        opened: the checkpoint as the table names it; what is quantised appears as what it stands for.
    """

    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    table: Sequence[Entry]
    carried: tuple[str, ...] = ()
    opened: Callable[[StoredCheckpoint], StoredCheckpoint] = lambda stored: stored


_DENSE = Family(dense.decoder_config, dense.TABLE)
_QWEN3_5 = Family(qwen3_5.decoder_config, qwen3_5.TABLE, qwen3_5.CARRIED)
_GEMMA4 = Family(gemma4.decoder_config, gemma4.TABLE, gemma4.CARRIED)

FAMILIES: Mapping[str, Family] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": Family(experts.qwen3_moe_config, experts.QWEN3_MOE),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "gpt_oss": Family(experts.gpt_oss_config, experts.GPT_OSS, opened=dequantised),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: it is of none of them.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"config.json: expected model_type to be one of {', '.join(FAMILIES)}, got {kind!r}; "
            "choose a checkpoint of one of these families"
        )
    return FAMILIES[kind]


def table_of(config: Mapping[str, Any]) -> list[Entry]:
    """The table of a config.json: where other senses stand beside the language model, its names are a level deeper."""
    table = family_of(config).table
    if not config.get("text_config"):
        return list(table)
    return [entry.renamed(re.sub(r"^model\.", "model.language_model.", entry.theirs)) for entry in table]


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the family's defaults for what it leaves out, its older names said anew."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it finds no torch, which isn't needed
    from transformers import CONFIG_MAPPING

    filled: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    return filled
