"""The device mesh."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices` (all of them where None) with the axes data, fsdp and tensor.

    The axis type is written out: jit places intermediate arrays by itself (`Auto`), and JAX's default has changed
    before.

    Args:
        data: copies of the parameters, each with its share of the rows.
        fsdp: devices that share the parameters, and the rows.
        tensor: devices that share heads, feed-forward width and vocabulary.

    Raises:
        ValueError: an axis is below 1, or the product is not the number of devices.
    """
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"mesh.{axis}: expected at least 1 device, got {size}; give 1 for an axis that is not used"
            )
    devices = jax.devices() if devices is None else devices
    product = data * fsdp * tensor
    if product != len(devices):
        shape = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh: expected a product equal to the {len(devices)} devices there are, got {shape} = {product}; "
            "change an axis, or pass the devices to use"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
