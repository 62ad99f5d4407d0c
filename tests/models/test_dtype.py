"""What narrow parameters keep wide."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from searchrl_jax.models.dtype import held_in
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

PARAMS = tiny_params(tiny_decoder_config(60), 0)


def test_what_is_wider_than_the_embedding_stays_so():
    flat = flatten_dict(jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS), sep="/")
    wide = {name for name in flat if name.endswith("mlp_norm/scale")}
    flat |= {name: flat[name].astype(jnp.float32) + 1e-4 for name in wide}
    held = flatten_dict(held_in(unflatten_dict(flat, sep="/"), jnp.dtype("bfloat16")), sep="/")
    assert wide
    for name, x in held.items():
        assert x.dtype == ("float32" if name in wide else "bfloat16"), name
        np.testing.assert_array_equal(x, flat[name].astype(x.dtype))


def test_float32_holds_everything():
    mixed = held_in(jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS), jnp.dtype("float32"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(mixed))
