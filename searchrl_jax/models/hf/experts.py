"""The families with experts: qwen3_moe and gpt_oss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from searchrl_jax.models.config import DecoderConfig, Experts, Layer
from searchrl_jax.models.hf import dense
from searchrl_jax.models.hf.layers import pattern_of, sizes_of
from searchrl_jax.models.hf.layout import INTERLEAVED, LINEAR
from searchrl_jax.models.hf.require import require
from searchrl_jax.models.hf.table import Entry
from searchrl_jax.ops.rope import Yarn

QWEN3_MOE = (
    *dense.TABLE,
    Entry("model.layers.{}.mlp.gate.weight", "layers/router", layout=LINEAR),
    Entry("model.layers.{}.mlp.experts.{}.gate_proj.weight", "layers/expert_gate", layout=LINEAR),
    Entry("model.layers.{}.mlp.experts.{}.up_proj.weight", "layers/expert_up", layout=LINEAR),
    Entry("model.layers.{}.mlp.experts.{}.down_proj.weight", "layers/expert_down", layout=LINEAR),
)

# As transformers saves it unquantised; see `mxfp4` for how it comes.
_GATE_UP = "model.layers.{}.mlp.experts.gate_up_proj"
GPT_OSS = (
    *dense.TABLE,
    Entry("model.layers.{}.self_attn.o_proj.bias", "layers/o_bias"),
    Entry("model.layers.{}.self_attn.sinks", "layers/sink"),
    Entry("model.layers.{}.mlp.router.weight", "layers/router", layout=LINEAR),
    Entry("model.layers.{}.mlp.router.bias", "layers/router_bias"),
    Entry(_GATE_UP, "layers/expert_gate", "layers/expert_up", layout=INTERLEAVED),
    Entry(f"{_GATE_UP}_bias", "layers/expert_gate_bias", "layers/expert_up_bias", layout=INTERLEAVED),
    Entry("model.layers.{}.mlp.experts.down_proj", "layers/expert_down"),
    Entry("model.layers.{}.mlp.experts.down_proj_bias", "layers/expert_down_bias"),
)


def qwen3_moe_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a complete config.json of qwen3_moe describes.

    Raises:
        ValueError: it asks for something that the decoder doesn't compute.
    """
    require(config, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return dataclasses.replace(
        dense.decoder_config(config),
        ff_dim=config["moe_intermediate_size"],
        experts=Experts(config["num_local_experts"], config["num_experts_per_tok"]),
    )


def gpt_oss_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a complete config.json of gpt_oss describes.

    Raises:
        ValueError: it asks for something that the decoder doesn't compute.
    """
    require(config, attention_bias=True, hidden_act="silu", swiglu_alpha=1.702)
    rope = config["rope_parameters"]
    require(rope, rope_type="yarn", truncate=False, attention_factor=None, mscale=None, mscale_all_dim=None)
    require(config, partial_rotary_factor=1.0)
    require(rope, partial_rotary_factor=1.0)
    window = config["sliding_window"]
    if not window or window < 1:
        raise ValueError(f"config.json: expected a sliding_window of at least 1, got {window!r}; correct it")
    kinds = {"sliding_attention": Layer(window=window), "full_attention": Layer()}
    return DecoderConfig(
        **sizes_of(config),
        rope_theta=rope["rope_theta"],
        pattern=pattern_of(config["layer_types"], kinds),
        yarn=Yarn(
            factor=rope["factor"],
            original_length=rope["original_max_position_embeddings"],
            fast=rope.get("beta_fast") or 32.0,
            slow=rope.get("beta_slow") or 1.0,
        ),
        experts=Experts(config["num_local_experts"], config["num_experts_per_tok"], limit=config["swiglu_limit"]),
        has_tied_embedding=config["tie_word_embeddings"],
        has_qk_norm=False,
        has_qkv_bias=True,
        has_sinks=True,
    )
