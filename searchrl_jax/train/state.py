"""What training carries from step to step."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int

from searchrl_jax.config.schema import OptimizerConfig
from searchrl_jax.models.decoder import Params


@struct.dataclass
class TrainState:
    """Parameters, optimizer state, and the number of updates taken."""

    params: Params
    opt_state: Any
    updates: Int[Array, ""]


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, after clipping by the global norm (where that is not 0).

    The learning rate falls linearly, over `updates`, to `learning_rate_end` times what it began with.
    """
    schedule: optax.ScalarOrSchedule = config.learning_rate
    if config.learning_rate_end < 1:
        end = config.learning_rate * config.learning_rate_end
        schedule = optax.linear_schedule(config.learning_rate, end, max(updates, 1))
    adam = optax.adamw(
        schedule,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
    )
    if config.adam_grad_clip_norm == 0:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.adam_grad_clip_norm), adam)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(params=params, opt_state=optimizer.init(params), updates=jnp.zeros((), jnp.int32))
