"""The family of Gemma 4, its text part: windowed layers and, less often, ones that see all."""

from collections.abc import Mapping
from typing import Any

from searchrl_jax.models.config import DecoderConfig, Layer
from searchrl_jax.models.hf.layers import pattern_of, sizes_of
from searchrl_jax.models.hf.layout import FLAT, LINEAR
from searchrl_jax.models.hf.require import require
from searchrl_jax.models.hf.table import Entry

# Towers of the other senses, and what brings them to the model's width.
CARRIED = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")

_TYPES = ("sliding_attention", "full_attention")

TABLE = (
    Entry("model.embed_tokens.weight", "embedding"),
    Entry("model.layers.{}.input_layernorm.weight", "layers/attention_norm/scale"),
    Entry("model.layers.{}.self_attn.q_proj.weight", "layers/q", layout=LINEAR),
    Entry("model.layers.{}.self_attn.k_proj.weight", "layers/k", layout=LINEAR),
    Entry("model.layers.{}.self_attn.v_proj.weight", "layers/v", layout=LINEAR),
    Entry("model.layers.{}.self_attn.q_norm.weight", "layers/q_norm/scale"),
    Entry("model.layers.{}.self_attn.k_norm.weight", "layers/k_norm/scale"),
    Entry("model.layers.{}.self_attn.o_proj.weight", "layers/o", layout=LINEAR),
    Entry("model.layers.{}.post_attention_layernorm.weight", "layers/attention_post_norm/scale"),
    Entry("model.layers.{}.pre_feedforward_layernorm.weight", "layers/mlp_norm/scale"),
    Entry("model.layers.{}.mlp.gate_proj.weight", "layers/gate", layout=LINEAR),
    Entry("model.layers.{}.mlp.up_proj.weight", "layers/up", layout=LINEAR),
    Entry("model.layers.{}.mlp.down_proj.weight", "layers/down", layout=LINEAR),
    Entry("model.layers.{}.post_feedforward_layernorm.weight", "layers/mlp_post_norm/scale"),
    Entry("model.layers.{}.layer_scalar", "layers/layer_scale", layout=FLAT),
    Entry("model.norm.weight", "final_norm/scale"),
    Entry("lm_head.weight", "unembedding"),
)


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a complete config.json of this family describes.

    Raises:
        ValueError: it asks for something that the decoder doesn't compute.
    """
    text = config.get("text_config", config)
    require(text, attention_bias=False, hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=0)
    require(text, enable_moe_block=False, num_kv_shared_layers=0, use_double_wide_mlp=False)
    if text.get("use_bidirectional_attention") == "all":
        raise ValueError("config.json: expected attention to what came before alone, got use_bidirectional_attention")
    cap = text["final_logit_softcapping"]
    if cap is not None and cap <= 0:
        raise ValueError(f"config.json: expected final_logit_softcapping above 0 or null, got {cap!r}; correct it")
    local, far = (text["rope_parameters"][name] for name in _TYPES)
    require(local, rope_type="default")
    require(far, rope_type="proportional", factor=1.0)
    own = text["per_layer_config"]
    full = {str(i): own.get(str(i)) for i, name in enumerate(text["layer_types"]) if name == _TYPES[1]}
    sizes = next(iter(full.values())) or {}
    if own and own != dict.fromkeys(full, sizes):
        raise ValueError(f"config.json: expected the same sizes of all full_attention layers and no other, got {own}")
    kinds = {
        "sliding_attention": Layer(window=text["sliding_window"]),
        "full_attention": Layer(
            num_kv_heads=sizes.get("num_key_value_heads", 0),
            head_dim=sizes.get("head_dim", 0),
            rope_theta=far["rope_theta"],
            turning=far.get("partial_rotary_factor", 1.0),
            reads_keys=text["attention_k_eq_v"],
        ),
    }
    return DecoderConfig(
        **sizes_of(text),
        rope_theta=local["rope_theta"],
        pattern=pattern_of(text["layer_types"], kinds),
        has_tied_embedding=config["tie_word_embeddings"],
        is_gemma=True,
        logit_cap=cap,
    )
