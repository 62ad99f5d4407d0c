"""The dtype that a decoder's parameters are held and computed in."""

from typing import Any

import jax

from searchrl_jax.models.axes import PARAMETER_AXES
from searchrl_jax.models.decoder import Params
from searchrl_jax.parallel.rules import path_name

# What makes an array a matrix of a product, and not a scale, a bias, a rate or a tap.
_OF_MATRICES = {"embed", "vocab", "ff"}


def held_in(params: Params, dtype: Any) -> Params:
    """`params` as float32 or, in a narrower `dtype`, with its matrices in it.

    Scales, biases, rates and taps then stay as they are: they take no memory, and checkpoints of narrow matrices have
    them wider, or read them as 1 + w, which would be rounded.
    """

    def cast(path: tuple, x: Any) -> Any:
        is_matrix = bool(_OF_MATRICES.intersection(PARAMETER_AXES[path_name(path)]))
        return x.astype(dtype) if is_matrix or dtype == "float32" else x

    return jax.tree_util.tree_map_with_path(cast, params)
