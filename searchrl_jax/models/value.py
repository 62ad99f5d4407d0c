"""A value head: one number per hidden state, with weights of its own on the decoder's trunk."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, forward


class ValueHead(nn.Module):
    """A float32 linear map to one number, zero at the start, so that the first advantages are the returns."""

    @nn.compact
    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
        zeros = nn.initializers.zeros
        return nn.Dense(1, dtype=jnp.float32, param_dtype=jnp.float32, kernel_init=zeros, name="value")(hidden)[..., 0]


def init_value_head(config: DecoderConfig, key: Key[Array, ""]) -> Params:
    """Fresh parameters, `value/kernel` [D, 1] and `value/bias` [1], all zero."""
    return ValueHead().init(key, jnp.zeros((1, config.model_dim)))["params"]


def values(
    config: DecoderConfig,
    params: Params,
    value_params: Params,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L"]:
    """V[b, l]: the return expected once token l has been read.

    So the estimate *before* token t is emitted, which `rl.returns.gae` takes, is V[b, t - 1]. Padding gets a number
    too. The gradient reaches the decoder; stop it by passing `jax.lax.stop_gradient(params)`.

    Args:
        value_params: of `init_value_head`.
        tokens, positions, segment_ids: packed rows, as in `models.decoder.forward`.
    """
    hidden = forward(config, params, tokens, positions, segment_ids)
    return estimate(value_params, hidden)


def estimate(value_params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
    """The value of each hidden state: the return expected once its token has been read."""
    found: Any = ValueHead().apply({"params": value_params}, hidden)
    return found
