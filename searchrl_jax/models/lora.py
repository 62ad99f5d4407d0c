"""Low-rank adapters: what is trained in the place of a frozen base.

    W' = W + (alpha / rank) * A @ B        A [in, rank], B [rank, out], for each layer and each adapted W [in, out]

A policy is the base with its adapters beside it, and the decoder computes `x W + (x A) B`, in the engine as in the
learner: so both have the same log-probabilities, no dense gradient is ever made, the base may be narrower than the
adapters (added to bfloat16 weights, the small steps of a learning rate would be rounded off), and whoever shares the
base shares one copy of it. `merge` adds the product up once, at the end, for whoever plays the tuned policy.

Source:
    Hu et al. 2021, arXiv:2106.09685, eq. 3, whose A and B are B^T and A^T here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from searchrl_jax.models.axes import ADAPTED
from searchrl_jax.models.decoder import Params

Adapters = dict[str, Any]


def init_adapters(base: Params, targets: Sequence[str], rank: int, key: Key[Array, ""]) -> Adapters:
    """Fresh adapters, `layers/TARGET/{a,b}`, float32, with which the policy is the base exactly.

        A ~ uniform(-in ** -0.5, in ** -0.5), of standard deviation (3 in) ** -0.5        B = 0

    as the published implementations have it, so that their learning rates hold here. A target's A is the same whatever
    the other targets.

    Args:
        targets: names of `models.axes.ADAPTED`.
        rank: columns of A, and rows of B; at least 1.
        key: used for this alone.

    Raises:
        ValueError: there is no target, or one has another name.
    """
    unknown = [name for name in targets if name not in ADAPTED]
    if unknown or not targets:
        raise ValueError(f"targets: expected some of {', '.join(ADAPTED)}, got {list(targets)}; name those to adapt")

    def pair(name: str) -> dict[str, Array]:
        layers, inside, *outside = base["layers"][name].shape
        bound = inside**-0.5
        of_name = jax.random.fold_in(key, ADAPTED.index(name))
        return {
            "a": jax.random.uniform(of_name, (layers, inside, rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((layers, rank, *outside), jnp.float32),
        }

    return {"layers": {name: pair(name) for name in targets}}


def attach(base: Params, adapters: Adapters, scale: float) -> Params:
    """The policy's parameters, for all functions of `models.decoder`: the base as it is, and the adapters under "lora"
    with B times `scale`.

    Args:
        scale: alpha / rank.
    """
    pairs = {name: pair | {"b": scale * pair["b"]} for name, pair in adapters["layers"].items()}
    return base | {"lora": {"layers": pairs}}


def merge(base: Params, adapters: Adapters, scale: float) -> Params:
    """Full parameters, of the base's structure and dtypes: W + scale * A @ B for each adapted W.

    Equal to `attach` up to rounding; what is not adapted is the base's own array.
    """

    def merged(name: str, pair: dict[str, Array]) -> Array:
        w = base["layers"][name]
        delta = jnp.einsum("lir,lr...->li...", pair["a"], scale * pair["b"])
        return (w.astype(jnp.float32) + delta).astype(w.dtype)

    found = {name: merged(name, pair) for name, pair in adapters["layers"].items()}
    return base | {"layers": base["layers"] | found}
