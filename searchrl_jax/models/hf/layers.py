"""What all families say alike: sizes, and layers as the period that they repeat."""

from collections.abc import Mapping, Sequence
from typing import Any

from searchrl_jax.models.config import Layer


def sizes_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that a language model's complete configuration names alike in every family."""
    return {
        "vocab_size": text["vocab_size"],
        "num_layers": text["num_hidden_layers"],
        "model_dim": text["hidden_size"],
        "ff_dim": text["intermediate_size"],
        "num_heads": text["num_attention_heads"],
        "num_kv_heads": text["num_key_value_heads"],
        "head_dim": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "norm_epsilon": text["rms_norm_eps"],
    }


def pattern_of(names: Sequence[str], kinds: Mapping[str, Layer]) -> tuple[Layer, ...]:
    """The shortest period that `names` (`layer_types`) are whole repetitions of.

    Args:
        kinds: the layer of each name.

    Raises:
        ValueError: a name isn't known here.
    """
    if unknown := sorted(set(names) - kinds.keys()):
        raise ValueError(f"config.json: expected layer_types of {', '.join(kinds)}, got {', '.join(unknown)}")
    size = next(n for n in range(1, len(names) + 1) if list(names[:n]) * (len(names) // n) == list(names))
    return tuple(kinds[name] for name in names[:size])
