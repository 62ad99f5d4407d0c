"""The device mesh: what it refuses, and axes that a torus has no dimensions for."""

import jax
import numpy as np
import pytest

from searchrl_jax.parallel.mesh import AXES, make_mesh


def test_a_mesh_for_another_number_of_devices_is_refused():
    with pytest.raises(
        ValueError, match=r"product equal to the 1 devices there are, got data 2 \* fsdp 1 \* tensor 1 = 2"
    ):
        make_mesh(2, 1, 1, jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh.fsdp: expected at least 1 device, got 0"):
        make_mesh(1, 0, 1)


def test_an_axis_may_take_a_part_of_a_dimension(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("of a 4x4x4 torus, axes of 8 are no product of dimensions")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    assert mesh.axis_names == AXES and dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert np.array_equal(mesh.devices.ravel(), jax.devices()[:1])
