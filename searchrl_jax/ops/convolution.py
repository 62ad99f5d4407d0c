"""Short causal depthwise convolution, in the full form and in the form that continues from a state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    past: Float[Array, "B W-1 D"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """y_t = sum_j kernel_j * x_{t-j}, for j in [0, W).

    Args:
        past: the W - 1 inputs before x_0, oldest first; zeros at the start of a sequence.
        segment_ids: where given, an input of another packed trajectory counts as zero (and `past` with it).
    """
    T, width = x.shape[1], kernel.shape[0]
    extended = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    result = x * kernel[0].astype(x.dtype)
    for j in range(1, width):
        shifted = extended[:, width - 1 - j : width - 1 - j + T]
        if segment_ids is not None:
            before = jnp.pad(segment_ids, ((0, 0), (j, 0)), constant_values=-1)[:, :T]
            shifted = jnp.where((before == segment_ids)[..., None], shifted, 0)
        result = result + shifted * kernel[j].astype(x.dtype)
    return result


def convolution_state(
    x: Float[Array, "B T D"], past: Float[Array, "B W-1 D"], num_new: Int[Array, " B"]
) -> Float[Array, "B W-1 D"]:
    """The last W - 1 inputs of each row after `num_new[b]` tokens of `x` (the rest of the row is padding)."""
    extended = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    take = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, past.shape[1], axis=0))
    return take(extended, num_new)
