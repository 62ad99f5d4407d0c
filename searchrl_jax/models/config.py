"""The shape of a decoder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderConfig:
    """A Qwen3-shaped decoder: grouped-query attention with QK norm, rotary positions, SwiGLU, RMSNorm, tied embeddings.

    Args:
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), got {self.num_heads}; "
                "each key head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary pairs), got {self.head_dim}")
