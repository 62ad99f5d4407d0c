"""The dense families: llama, qwen2 and qwen3. They differ in QK norms and biases alone."""

from collections.abc import Mapping
from typing import Any

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf.layers import sizes_of
from searchrl_jax.models.hf.layout import FLAT, LINEAR
from searchrl_jax.models.hf.require import require
from searchrl_jax.models.hf.table import Entry

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TABLE = (
    Entry("model.embed_tokens.weight", "embedding"),
    Entry("model.layers.{}.input_layernorm.weight", "layers/attention_norm/scale"),
    Entry("model.layers.{}.self_attn.q_proj.weight", "layers/q", layout=LINEAR),
    Entry("model.layers.{}.self_attn.k_proj.weight", "layers/k", layout=LINEAR),
    Entry("model.layers.{}.self_attn.v_proj.weight", "layers/v", layout=LINEAR),
    Entry("model.layers.{}.self_attn.q_proj.bias", "layers/q_bias", layout=FLAT),
    Entry("model.layers.{}.self_attn.k_proj.bias", "layers/k_bias", layout=FLAT),
    Entry("model.layers.{}.self_attn.v_proj.bias", "layers/v_bias", layout=FLAT),
    Entry("model.layers.{}.self_attn.q_norm.weight", "layers/q_norm/scale"),
    Entry("model.layers.{}.self_attn.k_norm.weight", "layers/k_norm/scale"),
    Entry("model.layers.{}.self_attn.o_proj.weight", "layers/o", layout=LINEAR),
    Entry("model.layers.{}.post_attention_layernorm.weight", "layers/mlp_norm/scale"),
    Entry("model.layers.{}.mlp.gate_proj.weight", "layers/gate", layout=LINEAR),
    Entry("model.layers.{}.mlp.up_proj.weight", "layers/up", layout=LINEAR),
    Entry("model.layers.{}.mlp.down_proj.weight", "layers/down", layout=LINEAR),
    Entry("model.norm.weight", "final_norm/scale"),
    Entry("lm_head.weight", "unembedding"),
)


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a complete config.json of these families describes.

    Raises:
        ValueError: it asks for something that the decoder doesn't compute.
    """
    require(config, attention_bias=False, mlp_bias=False, use_sliding_window=False, hidden_act="silu")
    if others := sorted(set(config.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(f"config.json: expected layer_types of full_attention alone, got {', '.join(others)} as well")
    rope = config["rope_parameters"]
    require(rope, rope_type="default", partial_rotary_factor=1.0)
    family = config["model_type"]
    return DecoderConfig(
        **sizes_of(config),
        rope_theta=rope["rope_theta"],
        has_tied_embedding=config["tie_word_embeddings"],
        has_qk_norm=family.startswith("qwen3"),
        has_qkv_bias=family == "qwen2",
    )


def describe(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder of these families.

    Raises:
        ValueError: it is of none of them.
    """
    family = {(False, False): "llama", (False, True): "qwen2", (True, False): "qwen3"}.get(
        (config.has_qk_norm, config.has_qkv_bias)
    )
    if family is None or config.conv_width:
        raise ValueError(
            f"expected a decoder of a family that other programs know ({', '.join(ARCHITECTURES)}), got {config}; "
            "QK norms exclude biases there, and none has convolutions (conv_width=0)"
        )
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ff_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        # Its name of old, which every version reads.
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.has_tied_embedding,
    }
