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

    In a decoder of longer periods, `layers/PLACE/TARGET/{a,b}` for the layers that have such a matrix.

        A ~ uniform(-in ** -0.5, in ** -0.5), of standard deviation (3 in) ** -0.5        B = 0

    as the published implementations have it, so that their learning rates hold here. A target's A is the same whatever
    the other targets.

    Args:
        targets: names of `models.axes.ADAPTED`.
        rank: columns of A, and rows of B; at least 1.
        key: used for this alone.

    Raises:
        ValueError: there is no target, one has another name, or no layer has it.
    """
    unknown = [name for name in targets if name not in ADAPTED]
    if unknown or not targets:
        raise ValueError(f"targets: expected some of {', '.join(ADAPTED)}, got {list(targets)}; name those to adapt")

    def pair(name: str, w: Array, key: Key[Array, ""]) -> dict[str, Array]:
        layers, inside, *outside = w.shape
        bound = inside**-0.5
        of_name = jax.random.fold_in(key, ADAPTED.index(name))
        return {
            "a": jax.random.uniform(of_name, (layers, inside, rank), jnp.float32, -bound, bound),
            "b": jnp.zeros((layers, rank, *outside), jnp.float32),
        }

    def pairs(block: Params, key: Key[Array, ""]) -> Adapters:
        return {name: pair(name, block[name], key) for name in targets if name in block}

    layers = base["layers"]
    if "0" not in layers:
        found = pairs(layers, key)
    else:
        found = {place: pairs(block, jax.random.fold_in(key, 100 + int(place))) for place, block in layers.items()}
    blocks = [layers] if "0" not in layers else list(layers.values())
    missing = [name for name in targets if not any(name in block for block in blocks)]
    if missing:
        raise ValueError(f"targets: no layer of this decoder has a matrix {missing[0]!r}; leave it out")
    return {"layers": found}


def attach(base: Params, adapters: Adapters, scale: float) -> Params:
    """The policy's parameters, for all functions of `models.decoder`: the base as it is, and the adapters under "lora"
    with B times `scale`.

    Args:
        scale: alpha / rank.
    """

    def scaled(path: tuple, x: Array) -> Array:
        return scale * x if path[-1].key == "b" else x

    return base | {"lora": {"layers": jax.tree_util.tree_map_with_path(scaled, adapters["layers"])}}


def merge(base: Params, adapters: Adapters, scale: float) -> Params:
    """Full parameters, of the base's structure and dtypes: W + scale * A @ B for each adapted W.

    Equal to `attach` up to rounding; what is not adapted is the base's own array.
    """

    def merged(block: Params, pairs: Adapters) -> Params:
        found = {}
        for name, pair in pairs.items():
            if name.isdigit():
                found[name] = merged(block[name], pair)
            else:
                delta = jnp.einsum("lir,lr...->li...", pair["a"], scale * pair["b"])
                found[name] = (block[name].astype(jnp.float32) + delta).astype(block[name].dtype)
        return block | found

    return base | {"layers": merged(base["layers"], adapters["layers"])}
