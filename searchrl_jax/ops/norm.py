"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], *, epsilon: float) -> Float[Array, "... D"]:
    """`x` divided by its root mean square over the last axis, times `scale`.

        y = scale * x / sqrt(mean(x^2) + epsilon)

    The statistics are float32 whatever the dtype of `x`; the result has the dtype of `x`.

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    x_float32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_float32), axis=-1, keepdims=True) + epsilon)
    return (x_float32 * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)
