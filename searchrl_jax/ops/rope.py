"""Rotary position embedding."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Yarn:
    """Wavelengths stretched by `factor`, but for those that turn often within the context of pretraining.

    Args:
        factor: the new context over the old.
        original_length: tokens of the context of pretraining.
        fast: pairs that turn at least this often in it keep their wavelength.
        slow: pairs that turn at most this often in it are stretched in full.

    Source:
        Peng et al. 2023, arXiv:2309.00071, section 3.4.
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0


def rotary_tables(
    positions: Int[Array, "B T"],
    head_dim: int,
    theta: float,
    *,
    turning: float = 1.0,
    yarn: Yarn | None = None,
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of the angle positions * theta^(-2 i / H), for i in [0, H / 2).

    Angles stay float32: bfloat16 rounds position 257 to 256.

    Args:
        turning: the share of the pairs that turn, the fastest first; the angle of the others is 0.
        yarn: stretches wavelengths, and both tables are longer by 0.1 ln(factor) + 1, which sharpens attention.

    Source:
        Su et al. 2021, arXiv:2104.09864, eq. 15.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = theta**-exponent
    if turning < 1:
        frequency = jnp.where(jnp.arange(head_dim // 2) < int(turning * head_dim // 2), frequency, 0.0)
    if yarn is None:
        angle = positions.astype(jnp.float32)[..., None] * frequency
        return jnp.cos(angle), jnp.sin(angle)
    fast, slow = (
        head_dim * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (yarn.fast, yarn.slow)
    )
    fast, slow = max(fast, 0.0), min(slow, head_dim - 1.0)
    stretched = jnp.clip((jnp.arange(head_dim // 2) - fast) / max(slow - fast, 1e-3), 0.0, 1.0)
    frequency = frequency * (1 - stretched + stretched / yarn.factor)
    angle = positions.astype(jnp.float32)[..., None] * frequency
    length = 0.1 * math.log(max(yarn.factor, 1.0)) + 1
    return length * jnp.cos(angle), length * jnp.sin(angle)


def rotate(
    x: Float[Array, "B T N H"], cosine: Float[Array, "B T half"], sine: Float[Array, "B T half"]
) -> Float[Array, "B T N H"]:
    """`x` with each pair (x_i, x_{i + R/2}) of a head's first R dimensions turned by its angle; the tables have R/2.

    The halves are paired as in Llama and Qwen checkpoints of the Hugging Face hub, not interleaved as in the paper.
    """
    half = cosine.shape[-1]
    first, second, still = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate([*turned, still], axis=-1).astype(x.dtype)
