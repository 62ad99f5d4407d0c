"""A checkpoint shaped as Qwen3.6-27B's: all of its tensors, by name, and the memory that loading it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel is asked for the peak")


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("load_large.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "256", "40000"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_tensors_of_64_layers_are_read_and_written_and_the_rest_is_carried(found):
    # 48 layers of 14 tensors, 16 of 11, and 3; beside them, a vision tower and a layer that predicts further tokens.
    assert found["tensors"] == 48 * 14 + 16 * 11 + 3
    assert found["layers"] == 64 and found["carried"] == 27 * 12 + 9 + 15
    assert found["is_the_same"]


def test_beside_the_parameters_loading_holds_little_more_than_one_tensor(found):
    # jnp.asarray copies a tensor that isn't aligned, and XLA has its own room to work in: hence two tensors and 12 MB.
    assert found["peak"] < found["parameters"] + 2 * found["largest"] + 12e6, found
