"""What training carries from step to step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int

from searchrl_jax.config.schema import OptimizerConfig
from searchrl_jax.models.decoder import Params


@struct.dataclass
class Critic:
    """The value model's own parameters, and the state of its own optimizer."""

    params: Params
    opt_state: Any


@struct.dataclass
class TrainState:
    """What is trained (all parameters, or the adapters alone: `models.lora`), optimizer state, the number of updates
    taken, and the value model where there is one."""

    params: Params
    opt_state: Any
    updates: Int[Array, ""]
    critic: Critic | None = None


def make_optimizer(
    config: OptimizerConfig, updates: int, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay, after clipping by the global norm (where that is not 0).

    The learning rate falls linearly, over `updates`, to `learning_rate_end` times what it began with.

    Args:
        learning_rate: in the place of the configuration's, which is the policy's.
    """
    first = config.learning_rate if learning_rate is None else learning_rate
    schedule: optax.ScalarOrSchedule = first
    if config.learning_rate_end < 1:
        schedule = optax.linear_schedule(first, first * config.learning_rate_end, max(updates, 1))
    adam = optax.adamw(
        schedule,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
    )
    if config.state_dtype != "float32":
        adam = stored_as(adam, jnp.dtype(config.state_dtype))
    if config.adam_grad_clip_norm == 0:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.adam_grad_clip_norm), adam)


def lora_plus(optimizer: optax.GradientTransformation, ratio: float) -> optax.GradientTransformation:
    """`optimizer` for adapters, with `ratio` times its learning rate for each B.

    With one rate for both, what is right for A is too small for B by a factor that grows with the model's width. The
    updates are scaled, so weight decay follows the rate, and the gradient is clipped as before.

    Source:
        Hayou et al. 2024, arXiv:2402.12354, LoRA+.
    """

    def scaled(updates: Any, params: Any = None) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: ratio * x if path[-1].key == "b" else x, updates)

    return optimizer if ratio == 1 else optax.chain(optimizer, optax.stateless(scaled))


def stored_as(optimizer: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """`optimizer`, with the float32 arrays of its state kept in `dtype` between updates and computed in float32."""

    def cast(tree: Any, source: Any, target: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(target) if x.dtype == source else x, tree)

    def init(params: Any) -> Any:
        return cast(optimizer.init(params), jnp.float32, dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, cast(state, dtype, jnp.float32), params)
        return updates, cast(state, jnp.float32, dtype)

    return optax.GradientTransformation(init, update)


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    value_params: Params | None = None,
    value_optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
    """The state before the first update.

    Args:
        value_params: of the value model, with `value_optimizer`; None without one.
    """
    critic = None
    if value_params is not None and value_optimizer is not None:
        critic = Critic(value_params, value_optimizer.init(value_params))
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), critic)
