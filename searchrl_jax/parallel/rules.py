"""From logical axis names to placements: what a dimension *is* stands beside the model, where it *goes* stands here."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey

Logical = tuple[str | None, ...]

# Parameters are split over fsdp along the model width, and over tensor along what is wide in the middle of a product.
RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "tokens": ("tensor",),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ff": ("tensor",),
    "experts": (),
    "layers": (),
}


def partition_spec(logical: Logical, rules: Mapping[str, tuple[str, ...]] = RULES) -> PartitionSpec:
    """The mesh axes of each dimension; None names a dimension that is never split.

    Raises:
        ValueError: a name has no rule, or two names of one array map to the same mesh axis.
    """
    unknown = [name for name in logical if name is not None and name not in rules]
    if unknown:
        raise ValueError(f"axes {logical}: expected names out of {sorted(rules)}, got {unknown[0]!r}; give it a rule")
    mapped = tuple(() if name is None else rules[name] for name in logical)
    used = [axis for axes in mapped for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(
                f"axes {logical} map to {mapped}: mesh axis {axis!r} is used twice; "
                "give one of the two names another rule"
            )
    return PartitionSpec(*(axes or None for axes in mapped))


def tree_shardings(
    mesh: Mesh, tree: Any, axes: Mapping[str, Logical], rules: Mapping[str, tuple[str, ...]] = RULES
) -> Any:
    """A NamedSharding for each leaf of `tree`, of the same structure.

    Works on parameters, on whatever holds copies of them (an optimizer's moments, a whole train state), and on flat
    dataclasses such as a cache. Scalars are replicated. So is nothing else: a dimension that its mesh axes don't divide
    is refused, since padding or replicating it in silence would cost memory that nobody planned for. To replicate it,
    give its name the rule `()`.

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s.
        axes: logical names by path: dict keys joined by "/", or field names where a path has no dict key. Keys that are
            numbers, the place of a layer in its period, are left out.
        rules: mesh axes by logical name.

    Raises:
        ValueError: a leaf without a rule, with another rank than its rule, or with a dimension that does not divide.
    """

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        if leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        name = _name(path)
        if name not in axes:
            raise ValueError(f"{name}: expected a path out of {sorted(axes)}; name the axes of this array there")
        logical = axes[name]
        if len(logical) != leaf.ndim:
            raise ValueError(
                f"{name}: expected {len(logical)} dimensions {logical}, got shape {leaf.shape}; correct one"
            )
        spec = partition_spec(logical, rules)
        for label, size in zip(logical, leaf.shape, strict=True):
            split = () if label is None else rules[label]
            parts = math.prod(mesh.shape[axis] for axis in split)
            if size % parts:
                raise ValueError(
                    f"{name}: expected {label} to be a multiple of {parts} (mesh axes {split}), got {size}; "
                    f"choose a mesh that divides it, or replicate it with the rule {label!r}: ()"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _name(path: tuple) -> str:
    keys = [str(key.key) for key in path if isinstance(key, DictKey) and not str(key.key).isdigit()]
    return "/".join(keys or [key.name for key in path if isinstance(key, GetAttrKey)])


def spread(x: jax.Array, mesh: Mesh | None, logical: Logical) -> jax.Array:
    """`x` inside a jitted function, kept where its logical axes say; as it is on one device.

    XLA propagates placements from the parameters, and would otherwise split the model width of a long row's activations
    over fsdp, with all rows on every device. An axis that its mesh axes don't divide stays whole.
    """
    if mesh is None or mesh.size == 1:
        return x
    fits = [
        name if name and size % math.prod(mesh.shape[axis] for axis in RULES[name]) == 0 else None
        for name, size in zip(logical, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(tuple(fits))))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """The placement of batch rows, along the first dimension."""
    return NamedSharding(mesh, partition_spec(("rows",)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def place_rows(mesh: Mesh, tree: Any) -> Any:
    """`tree` with the first dimension of every array split over the rows' mesh axes.

    Raises:
        ValueError: the number of rows does not divide.
    """
    parts = math.prod(mesh.shape[axis] for axis in RULES["rows"])
    for leaf in jax.tree.leaves(tree):
        if leaf.shape[0] % parts:
            raise ValueError(
                f"expected a multiple of {parts} rows (data {mesh.shape['data']} * fsdp {mesh.shape['fsdp']}), "
                f"got {leaf.shape[0]}; change the rows of a micro-batch or the mesh"
            )
    return jax.device_put(tree, row_sharding(mesh))
