"""A mixture of experts without capacity: every token reaches all experts that it chose."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def choose(logits: Float[Array, "... E"], chosen: int) -> tuple[Float[Array, "... X"], Int[Array, "... X"]]:
    """The `chosen` experts of highest logit of each token, with the softmax over their logits as weights (float32).

    The same as the softmax over all experts, renormalised over those chosen.
    """
    top, index = jax.lax.top_k(logits.astype(jnp.float32), chosen)
    return jax.nn.softmax(top, axis=-1), index


def mix_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M X"],
    index: Int[Array, "M X"],
    count: int,
    expert: Callable[[Float[Array, "M*X D"], Int[Array, " E"], Int[Array, " M*X"]], Float[Array, "M*X D"]],
) -> Float[Array, "M D"]:
    """sum_x weights_{m,x} expert_{index_{m,x}}(x_m).

    Tokens are sorted by expert, so that each expert multiplies its own rows alone.

    Args:
        count: how many experts there are.
        expert: given rows sorted by expert, the number of rows of each and the expert of each row, what they become.
    """
    chosen = index.shape[1]
    of_row = index.reshape(-1)
    order = jnp.argsort(of_row)
    sizes = jnp.bincount(of_row, length=count)
    y = expert(x[order // chosen], sizes, of_row[order])
    y = y * weights.reshape(-1)[order, None].astype(y.dtype)
    return jnp.zeros_like(x).at[order // chosen].add(y)
