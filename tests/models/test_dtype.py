"""What narrow parameters keep wide."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from searchrl_jax.models.dtype import held_in
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

PARAMS = tiny_params(tiny_decoder_config(60), 0)


def test_matrices_are_narrow_and_scales_are_not():
    narrow = flatten_dict(held_in(PARAMS, jnp.dtype("bfloat16")), sep="/")
    for name, x in flatten_dict(PARAMS, sep="/").items():
        is_scale = name.endswith("scale")
        assert narrow[name].dtype == ("float32" if is_scale else "bfloat16"), name
        if is_scale:
            np.testing.assert_array_equal(narrow[name], x)


def test_float32_holds_everything():
    mixed = held_in(jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS), jnp.dtype("float32"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(mixed))
