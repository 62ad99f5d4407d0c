"""The dtype that a decoder's parameters are held and computed in."""

from typing import Any

import jax
import jax.numpy as jnp

from searchrl_jax.models.decoder import Params


def held_in(params: Params, dtype: Any) -> Params:
    """`params` as float32, or in a narrower `dtype`.

    What is wider than the embedding then stays as it is: the few numbers that a checkpoint has in float32 beside narrow
    matrices, or that are read as 1 + w and would be rounded.
    """
    narrow = params["embedding"].dtype
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == narrow or dtype == jnp.float32 else x, params)
