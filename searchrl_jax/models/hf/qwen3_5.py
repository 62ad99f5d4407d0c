"""The family of Qwen3.5 and 3.6, its text part: three layers of linear attention to one of attention."""

from collections.abc import Mapping
from typing import Any

from searchrl_jax.models.config import DecoderConfig, Delta, Layer
from searchrl_jax.models.hf.layers import pattern_of, sizes_of
from searchrl_jax.models.hf.layout import LESS_ONE, LINEAR, STACKED, STACKED_BY_HEAD, TAPS
from searchrl_jax.models.hf.require import require
from searchrl_jax.models.hf.table import Entry

# The vision tower, and the layers that predict further tokens.
CARRIED = ("model.visual.", "mtp.")

_ATTENTION = "model.layers.{}.self_attn."
_DELTA = "model.layers.{}.linear_attn."
TABLE = (
    Entry("model.embed_tokens.weight", "embedding"),
    Entry("model.layers.{}.input_layernorm.weight", "layers/attention_norm/scale", layout=LESS_ONE),
    Entry(f"{_ATTENTION}q_proj.weight", "layers/q", "layers/output_gate", layout=STACKED_BY_HEAD, kind="attention"),
    Entry(f"{_ATTENTION}k_proj.weight", "layers/k", layout=LINEAR, kind="attention"),
    Entry(f"{_ATTENTION}v_proj.weight", "layers/v", layout=LINEAR, kind="attention"),
    Entry(f"{_ATTENTION}q_norm.weight", "layers/q_norm/scale", layout=LESS_ONE, kind="attention"),
    Entry(f"{_ATTENTION}k_norm.weight", "layers/k_norm/scale", layout=LESS_ONE, kind="attention"),
    Entry(f"{_ATTENTION}o_proj.weight", "layers/o", layout=LINEAR, kind="attention"),
    Entry(f"{_DELTA}in_proj_qkv.weight", "layers/q", "layers/k", "layers/v", layout=STACKED, kind="delta"),
    Entry(f"{_DELTA}in_proj_z.weight", "layers/output_gate", layout=LINEAR, kind="delta"),
    Entry(f"{_DELTA}in_proj_b.weight", "layers/beta", layout=LINEAR, kind="delta"),
    Entry(f"{_DELTA}in_proj_a.weight", "layers/decay", layout=LINEAR, kind="delta"),
    Entry(f"{_DELTA}conv1d.weight", "layers/delta_conv", layout=TAPS, kind="delta", may_be_wide=True),
    Entry(f"{_DELTA}dt_bias", "layers/decay_bias", kind="delta", may_be_wide=True),
    Entry(f"{_DELTA}A_log", "layers/log_rate", kind="delta", may_be_wide=True),
    Entry(f"{_DELTA}norm.weight", "layers/output_norm/scale", kind="delta", may_be_wide=True),
    Entry(f"{_DELTA}out_proj.weight", "layers/o", layout=LINEAR, kind="delta"),
    Entry("model.layers.{}.post_attention_layernorm.weight", "layers/mlp_norm/scale", layout=LESS_ONE),
    Entry("model.layers.{}.mlp.gate_proj.weight", "layers/gate", layout=LINEAR),
    Entry("model.layers.{}.mlp.up_proj.weight", "layers/up", layout=LINEAR),
    Entry("model.layers.{}.mlp.down_proj.weight", "layers/down", layout=LINEAR),
    Entry("model.norm.weight", "final_norm/scale", layout=LESS_ONE),
    Entry("lm_head.weight", "unembedding"),
)


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a complete config.json of this family describes.

    Of the three positions that a token has among pictures, text has the same number in each, so that the rotary pairs
    of the three (`mrope_section`) are those of one.

    Raises:
        ValueError: it asks for something that the decoder doesn't compute.
    """
    text = config.get("text_config", config)
    require(text, attention_bias=False, hidden_act="silu")
    rope = text["rope_parameters"]
    require(rope, rope_type="default")
    kinds = {"linear_attention": Layer("delta"), "full_attention": Layer()}
    return DecoderConfig(
        **sizes_of(text),
        rope_theta=rope["rope_theta"],
        pattern=pattern_of(text["layer_types"], kinds),
        rotary_dim=int(text["head_dim"] * rope["partial_rotary_factor"]),
        delta=Delta(
            num_key_heads=text["linear_num_key_heads"],
            num_value_heads=text["linear_num_value_heads"],
            key_dim=text["linear_key_head_dim"],
            value_dim=text["linear_value_head_dim"],
            conv_width=text["linear_conv_kernel_dim"],
        ),
        has_output_gate=True,
        has_tied_embedding=config["tie_word_embeddings"],
    )
