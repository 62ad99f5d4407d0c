"""The families of checkpoints that are read and written, by the `model_type` of their config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf import dense
from searchrl_jax.models.hf.stored import StoredCheckpoint
from searchrl_jax.models.hf.table import Entry


@dataclass(frozen=True)
class Family:
    """What must be known of a family, beside the decoder itself. Both functions take a complete config.json.

    Args:
        decoder_config: the decoder that the configuration describes.
        table: names and layouts of its tensors.
        carried: beginnings of the names of tensors that are neither read nor changed: towers of other senses, heads
            that predict more tokens. They go from the source into what is saved.
        opened: the checkpoint as the table names it; what is quantised appears as what it stands for.
    """

    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    table: Callable[[Mapping[str, Any]], Sequence[Entry]]
    carried: tuple[str, ...] = ()
    opened: Callable[[StoredCheckpoint], StoredCheckpoint] = lambda stored: stored


DENSE = Family(dense.decoder_config, lambda config: dense.TABLE)

FAMILIES: Mapping[str, Family] = {"llama": DENSE, "qwen2": DENSE, "qwen3": DENSE}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: it is of none of them.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"config.json: expected model_type to be one of {', '.join(FAMILIES)}, got {kind!r}")
    return FAMILIES[kind]


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the family's defaults for what it leaves out, its older names said anew."""
    from transformers import CONFIG_MAPPING

    filled: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    return filled
