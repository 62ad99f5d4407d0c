"""The shape of a decoder: what all of its layers have in common, and the layers of one period."""

from dataclasses import dataclass, replace
from typing import Literal

from searchrl_jax.ops.rope import Yarn


@dataclass(frozen=True)
class Layer:
    """One layer of a period. A size of 0 is the decoder's own.

    Args:
        kind: "attention", or "delta": linear attention whose state follows the gated delta rule.
        window: tokens that a query reads at most, itself among them; None for all.
        turning: the share of a head's pairs that turn with the position, the fastest first; the others stand still.
        reads_keys: values are what the key projection makes, normalised, and there is no value projection.
    """

    kind: Literal["attention", "delta"] = "attention"
    window: int | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 0.0
    turning: float = 1.0
    reads_keys: bool = False


@dataclass(frozen=True)
class Delta:
    """The linear heads of "delta" layers: each key head serves the same number of value heads.

    Args:
        conv_width: taps of the causal depthwise convolution on queries, keys and values.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """Experts in the place of the feed-forward layer, each of the decoder's `ff_dim`.

    Args:
        chosen: experts per token, weighted by the softmax over the logits of those chosen.
        limit: what gates and inputs are clamped to before gpt-oss's SwiGLU, with biases; None for the plain one.
    """

    count: int
    chosen: int
    limit: float | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: pre-norm layers that repeat in periods, each a mixer of tokens and a gated feed-forward layer.

    | family | pattern | fields that differ from the default |
    |---|---|---|
    | llama | attention | no has_qk_norm |
    | qwen2 | attention | no has_qk_norm, has_qkv_bias |
    | qwen3 | attention | |
    | qwen3_moe | attention | experts |
    | qwen3_5 | 3 delta, 1 attention | delta, has_output_gate, rotary_dim |
    | gpt_oss | windowed attention, attention | no has_qk_norm, has_qkv_bias, has_sinks, experts, yarn |
    | gemma4 | 5 windowed attention, 1 attention with its own heads | is_gemma, logit_cap |

    Args:
        num_layers: a multiple of the pattern's length.
        conv_width: taps of the causal depthwise convolutions on what queries and keys are made of; 0 for none, as in
            imported checkpoints. A small decoder trained from nothing needs one to learn to copy a name.
        has_tied_embedding: logits come from the token embedding; otherwise from a matrix of their own, "unembedding".
        has_qk_norm: queries and keys are normalised by head before they are turned.
        has_qkv_bias: queries, keys and values have biases.
        pattern: the layers of one period.
        rotary_dim: the first dimensions of a head, which turn; None for all.
        yarn: how the angles are stretched beyond the context of pretraining.
        has_output_gate: sigmoid gates on what attention heads give out.
        has_sinks: a learned logit per head takes its share of attention and gives nothing; the output has a bias.
        is_gemma: embeddings times sqrt(model_dim), scores not divided by sqrt(head_dim), normalised values, norms on
            what each half of a layer gives out, GELU, and a fixed scale of each layer's output.
        logit_cap: logits are bounded by cap * tanh(logit / cap).
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    ff_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-6
    conv_width: int = 0
    has_tied_embedding: bool = True
    has_qk_norm: bool = True
    has_qkv_bias: bool = False
    pattern: tuple[Layer, ...] = (Layer(),)
    rotary_dim: int | None = None
    yarn: Yarn | None = None
    delta: Delta | None = None
    experts: Experts | None = None
    has_output_gate: bool = False
    has_sinks: bool = False
    is_gemma: bool = False
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        for layer in self.period:
            if self.num_heads % layer.num_kv_heads:
                raise ValueError(
                    f"num_heads: expected a multiple of num_kv_heads ({layer.num_kv_heads}), got {self.num_heads}; "
                    "each key head serves the same number of query heads"
                )
            if layer.head_dim % 2:
                raise ValueError(f"head_dim: expected an even number (rotary pairs), got {layer.head_dim}")
            if layer.kind == "delta" and self.delta is None:
                raise ValueError('delta: expected the heads of the "delta" layers of the pattern, got None; give them')
        if self.num_layers % len(self.pattern):
            raise ValueError(
                f"num_layers: expected a multiple of the pattern's {len(self.pattern)} layers, got {self.num_layers}; "
                "write a longer pattern"
            )
        if self.delta is not None and self.delta.num_value_heads % self.delta.num_key_heads:
            raise ValueError(
                f"delta.num_value_heads: expected a multiple of num_key_heads ({self.delta.num_key_heads}), "
                f"got {self.delta.num_value_heads}; each key head serves the same number of value heads"
            )

    @property
    def period(self) -> tuple[Layer, ...]:
        """The pattern with the decoder's own sizes where a layer has none."""
        return tuple(
            replace(
                layer,
                num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
                head_dim=layer.head_dim or self.head_dim,
                rope_theta=layer.rope_theta or self.rope_theta,
            )
            for layer in self.pattern
        )

    @property
    def num_periods(self) -> int:
        return self.num_layers // len(self.pattern)

    @property
    def is_unrolled(self) -> bool:
        """Layers are written out one by one: faster for a small decoder. A deep one is a loop, and compiles in constant
        time."""
        return self.num_layers <= 8
