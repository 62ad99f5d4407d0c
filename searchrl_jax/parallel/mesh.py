"""The device mesh."""

from collections.abc import Sequence

import jax
from jax.experimental.mesh_utils import create_device_mesh
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
        factors = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh: expected a product equal to the {len(devices)} devices there are, got {factors} = {product}; "
            "change an axis"
        )
    shape, types = (data, fsdp, tensor), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # an axis takes a part of a dimension of the torus, as 8 does of 4x4x4
        return Mesh(create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES, axis_types=types)


def device_memory(mesh: Mesh) -> dict[str, float]:
    """`memory/in_use_gb` and `memory/peak_gb` of this process's fullest device of the mesh, in 1e9 bytes.

    Empty where the backend doesn't say, as on a CPU.
    """
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    names = {"memory/in_use_gb": "bytes_in_use", "memory/peak_gb": "peak_bytes_in_use"}
    return {name: max(s[key] for s in stats) / 1e9 for name, key in names.items() if all(key in s for s in stats)}
