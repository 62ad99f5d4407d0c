"""A small instance of every family, with weights from a seed, in our layout and as transformers names them."""

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from searchrl_jax.models.config import DecoderConfig, Delta, Experts, Layer
from searchrl_jax.models.decoder import init_params
from searchrl_jax.ops.rope import Yarn

V, D, F, N, K, H = 40, 16, 24, 4, 2, 8
TOKENS = np.random.default_rng(0).integers(0, V, (2, 14))
SIZES = dict(vocab_size=V, model_dim=D, ff_dim=F, num_heads=N, num_kv_heads=K, head_dim=H)


@dataclass(frozen=True)
class Family:
    """Our configuration, and the one of transformers that means the same."""

    config: DecoderConfig
    model: str
    settings: dict[str, Any]


def _rope(theta, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


FAMILIES = {
    "llama": Family(
        DecoderConfig(**SIZES, num_layers=2, rope_theta=1e4, norm_epsilon=1e-5, has_qk_norm=False),
        "Llama",
        dict(rope_parameters=_rope(1e4), rms_norm_eps=1e-5, tie_word_embeddings=True),
    ),
    "qwen2": Family(
        DecoderConfig(
            **SIZES, num_layers=2, rope_theta=1e4, has_qk_norm=False, has_qkv_bias=True, has_tied_embedding=False
        ),
        "Qwen2",
        dict(rope_parameters=_rope(1e4), tie_word_embeddings=False),
    ),
    "qwen3": Family(
        DecoderConfig(**SIZES, num_layers=2),
        "Qwen3",
        dict(rope_parameters=_rope(1e6), tie_word_embeddings=True),
    ),
    "qwen3_moe": Family(
        DecoderConfig(**SIZES, num_layers=2, experts=Experts(4, 2), has_tied_embedding=False),
        "Qwen3Moe",
        dict(
            rope_parameters=_rope(1e6),
            moe_intermediate_size=F,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3_5": Family(
        DecoderConfig(
            **SIZES,
            num_layers=8,
            rope_theta=1e4,
            pattern=(Layer("delta"), Layer("delta"), Layer("delta"), Layer()),
            delta=Delta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_width=4),
            rotary_dim=4,
            has_output_gate=True,
            has_tied_embedding=False,
        ),
        "Qwen3_5",
        dict(
            rope_parameters=_rope(1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True),
            linear_conv_kernel_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=6,
            linear_value_head_dim=10,
            tie_word_embeddings=False,
        ),
    ),
    "gpt_oss": Family(
        DecoderConfig(
            **SIZES,
            num_layers=4,
            rope_theta=1e4,
            norm_epsilon=1e-5,
            pattern=(Layer(window=5), Layer()),
            yarn=Yarn(factor=4.0, original_length=16, fast=4.0, slow=1.0),
            experts=Experts(4, 2, limit=1.0),
            has_qk_norm=False,
            has_qkv_bias=True,
            has_sinks=True,
            has_tied_embedding=False,
        ),
        "GptOss",
        dict(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=1.0,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        ),
    ),
    "gemma4": Family(
        DecoderConfig(
            **SIZES,
            num_layers=6,
            rope_theta=1e4,
            pattern=(
                Layer(window=5),
                Layer(window=5),
                Layer(num_kv_heads=1, head_dim=16, rope_theta=1e5, turning=0.5, reads_keys=True),
            ),
            is_gemma=True,
            logit_cap=3.0,
        ),
        "Gemma4",
        dict(
            rope_parameters={
                "sliding_attention": _rope(1e4),
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            },
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            sliding_window=5,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
        ),
    ),
}


def common_settings(config):
    """What every configuration of transformers calls alike."""
    return dict(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=config.num_layers,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        pad_token_id=None,
        attn_implementation="eager",
    )


def names(tree):
    return {"/".join(key.key for key in path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def drawn(config, kind):
    """Parameters ("weights"), or a direction in them ("direction"), as a dict from paths to arrays.

    Each is drawn by its path, and of such a scale that everything matters: no norm or gate is the identity.
    """
    found = {}
    for path, shape in names(jax.eval_shape(lambda: init_params(config, jax.random.key(0)))).items():
        rng = np.random.default_rng([zlib.crc32(path.encode()), kind == "weights"])
        x = rng.normal(size=shape.shape)
        if kind == "weights":
            name = path.split("/")[-1]
            if name == "scale":
                x = 1 + 0.3 * x
            elif name == "layer_scale":
                x = 0.8 + 0.1 * x
            elif name not in ("log_rate", "decay_bias", "sink"):
                inside = 1 if name.endswith("bias") else shape.shape[2 if name.startswith("expert") else -2]
                inside = shape.shape[1] if name in ("q", "k", "v", "output_gate") else inside
                x = x * (0.5 if name.endswith("bias") else {"embedding": D**-0.5}.get(name, inside**-0.5))
        found[path] = x.astype(np.float32)
    return found


def nested(flat):
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        *parents, name = path.split("/")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = x
    return tree


def for_transformers(family, flat):
    """What transformers calls these parameters. Linear, but for norms that it stores less 1."""
    config, found = FAMILIES[family].config, {}

    def matrix(x):
        """[in, ...] to [out, in]."""
        return x.reshape(x.shape[0], -1).T

    less_one = 1.0 if family == "qwen3_5" else 0.0
    found["model.embed_tokens.weight"] = flat["embedding"]
    found["lm_head.weight"] = flat.get("unembedding", flat["embedding"])
    found["model.norm.weight"] = flat["final_norm/scale"] - less_one
    length = len(config.pattern)
    feed_norm = "pre_feedforward_layernorm" if config.is_gemma else "post_attention_layernorm"
    for i in range(config.num_layers):
        prefix = f"layers/{i % length}/" if length > 1 else "layers/"
        at = {path.removeprefix(prefix): x[i // length] for path, x in flat.items() if path.startswith(prefix)}
        out = {"input_layernorm.weight": at["attention_norm/scale"] - less_one}
        out[f"{feed_norm}.weight"] = at["mlp_norm/scale"] - less_one
        if "delta_conv" in at:
            out["linear_attn.in_proj_qkv.weight"] = np.concatenate([matrix(at[name]) for name in "qkv"])
            out["linear_attn.in_proj_z.weight"] = matrix(at["output_gate"])
            out["linear_attn.in_proj_b.weight"] = matrix(at["beta"])
            out["linear_attn.in_proj_a.weight"] = matrix(at["decay"])
            out["linear_attn.conv1d.weight"] = at["delta_conv"][::-1].T[:, None]
            out["linear_attn.dt_bias"] = at["decay_bias"]
            out["linear_attn.A_log"] = at["log_rate"]
            out["linear_attn.norm.weight"] = at["output_norm/scale"]
            out["linear_attn.out_proj.weight"] = matrix(at["o"])
        else:
            for name in "qkvo":
                if name in at:
                    out[f"self_attn.{name}_proj.weight"] = matrix(at[name])
                if f"{name}_bias" in at:
                    out[f"self_attn.{name}_proj.bias"] = at[f"{name}_bias"].reshape(-1)
                if f"{name}_norm/scale" in at:
                    out[f"self_attn.{name}_norm.weight"] = at[f"{name}_norm/scale"] - less_one
            if "output_gate" in at:
                out["self_attn.q_proj.weight"] = matrix(np.concatenate([at["q"], at["output_gate"]], axis=-1))
            if "sink" in at:
                out["self_attn.sinks"] = at["sink"]
        for name in ("gate", "up", "down"):
            if name in at:
                out[f"mlp.{name}_proj.weight"] = matrix(at[name])
        if family == "qwen3_moe":
            out["mlp.gate.weight"] = matrix(at["router"])
            both = np.concatenate([at["expert_gate"], at["expert_up"]], axis=-1)
            out["mlp.experts.gate_up_proj"] = both.swapaxes(1, 2)
            out["mlp.experts.down_proj"] = at["expert_down"].swapaxes(1, 2)
        if family == "gpt_oss":
            out["mlp.router.weight"], out["mlp.router.bias"] = matrix(at["router"]), at["router_bias"]
            out["mlp.experts.down_proj"] = at["expert_down"]
            out["mlp.experts.down_proj_bias"] = at["expert_down_bias"]
            for name, end in (("", ""), ("_bias", "_bias")):
                both = np.stack([at[f"expert_gate{name}"], at[f"expert_up{name}"]], axis=-1)
                out[f"mlp.experts.gate_up_proj{end}"] = both.reshape(*both.shape[:-2], -1)
        if config.is_gemma:
            out["post_attention_layernorm.weight"] = at["attention_post_norm/scale"]
            out["post_feedforward_layernorm.weight"] = at["mlp_post_norm/scale"]
            out["layer_scalar"] = at["layer_scale"].reshape(1)
        found.update({f"model.layers.{i}.{name}": x for name, x in out.items()})
    return {name: np.ascontiguousarray(x) for name, x in found.items()}
