"""The decoders of the checkpoints that experiments name, so that a plan for them needs no download.

Facts of the config.json of each; what a run computes with is read from the checkpoint itself.
"""

from collections.abc import Mapping

from searchrl_jax.models.config import DecoderConfig, Delta, Experts, Layer
from searchrl_jax.ops.rope import Yarn

_QWEN3_6_27B = DecoderConfig(
    vocab_size=248_320,
    num_layers=64,
    model_dim=5120,
    ff_dim=17_408,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    rope_theta=1e7,
    pattern=(Layer("delta"), Layer("delta"), Layer("delta"), Layer()),
    rotary_dim=64,
    delta=Delta(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4),
    has_output_gate=True,
    has_tied_embedding=False,
)

_GPT_OSS_20B = DecoderConfig(
    vocab_size=201_088,
    num_layers=24,
    model_dim=2880,
    ff_dim=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=150_000.0,
    norm_epsilon=1e-5,
    pattern=(Layer(window=128), Layer()),
    yarn=Yarn(factor=32.0, original_length=4096, fast=32.0, slow=1.0),
    experts=Experts(count=32, chosen=4, limit=7.0),
    has_tied_embedding=False,
    has_qk_norm=False,
    has_qkv_bias=True,
    has_sinks=True,
)

_LOCAL = Layer(window=1024)
_GEMMA_4_31B = DecoderConfig(
    vocab_size=262_144,
    num_layers=60,
    model_dim=5376,
    ff_dim=21_504,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    rope_theta=1e4,
    pattern=(
        *[_LOCAL] * 5,
        Layer(num_kv_heads=4, head_dim=512, rope_theta=1e6, turning=0.25, reads_keys=True),
    ),
    is_gemma=True,
    logit_cap=30.0,
)

DECODERS: Mapping[str, DecoderConfig] = {
    "hf://Qwen/Qwen3.6-27B": _QWEN3_6_27B,
    "hf://openai/gpt-oss-20b": _GPT_OSS_20B,
    "hf://google/gemma-4-31B-it": _GEMMA_4_31B,
}
