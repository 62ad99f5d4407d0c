"""The shape of a decoder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: grouped-query attention with rotary positions, SwiGLU and RMSNorm; what families differ in is a field.

    | family | has_qk_norm | has_qkv_bias |
    |---|---|---|
    | llama | no | no |
    | qwen2 | no | yes |
    | qwen3 | yes | no |

    Args:
        has_tied_embedding: logits come from the token embedding; otherwise from a matrix of their own, "unembedding".
        has_qk_norm: queries and keys are normalised by head before they are turned.
        has_qkv_bias: queries, keys and values have biases.
        conv_width: taps of the causal depthwise convolutions on what queries and keys are made of; 0 for none, as in
            imported checkpoints. A small decoder trained from nothing needs one to learn to copy a name.
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), got {self.num_heads}; "
                "each key head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary pairs), got {self.head_dim}")
