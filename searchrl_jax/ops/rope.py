"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_tables(
    positions: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of the angle positions * theta^(-2 i / H), for i in [0, H / 2).

    Angles stay float32: bfloat16 rounds position 257 to 256.

    Source:
        Su et al. 2021, arXiv:2104.09864, eq. 15.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle = positions.astype(jnp.float32)[..., None] * theta**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T N H"], cosine: Float[Array, "B T half"], sine: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """`x` with each pair (x_i, x_{i + H/2}) of a head turned by its angle.

    The halves are paired as in Llama and Qwen checkpoints of the Hugging Face hub, not interleaved as in the paper.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)
