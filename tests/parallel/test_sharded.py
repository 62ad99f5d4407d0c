"""Training and sampling on a mesh of eight virtual devices equal those on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # Little is computed here and much compiled, so the compiler is told to hurry.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("eight_devices.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_update_on_eight_devices_equals_one(found):
    assert found["devices"] == 8
    assert found["losses"][1] == pytest.approx(found["losses"][0], abs=1e-5)
    assert found["moved"] > 1e-2 and found["differ"] < 1e-4


def test_the_whole_loss_on_one_two_and_eight_devices_has_one_gradient(found):
    """Clipped policy loss, divergence, entropy and value loss, over rows with 1 and with 90 action tokens."""
    assert found["full_losses"][1:] == pytest.approx([found["full_losses"][0]] * 2, abs=1e-5)
    assert found["full_moved"] > 1e-2 and max(found["full_differ"]) < 5e-6


def test_the_learner_on_one_two_and_eight_devices_learns_the_same(found):
    """Value model, proximal policy, weights to it, dual clip and a divergence in the reward, scored on the mesh."""
    assert found["learner_moved"] > 1e-4 and max(found["learner_differ"]) < 1e-2 * found["learner_moved"]
    one, *others = found["learner_metrics"]
    assert one["learner/value_loss"] > 0 and one["learner/importance_weight_mean"] != 1
    for metrics in others:
        assert metrics == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in one.items()}


def test_the_update_of_adapters_on_eight_devices_equals_one(found):
    assert found["adapter_losses"][1] == pytest.approx(found["adapter_losses"][0], abs=1e-5)
    assert found["adapters_moved"] > 1e-2 and found["adapters_differ"] < 5e-6
    # Of q: A [2, 32, 3], B [2, 3, 4, 8]; of down: A [2, 64, 3], B [2, 3, 32].
    assert found["adapter_parts"] == [[2, 16, 3], [2, 3, 2, 8], [2, 32, 3], [2, 3, 16]]


def test_parameters_and_moments_are_split_and_stay_so(found):
    assert found["gate"] == [[2, 32, 64], [2, 16, 32]] and found["moment"] == [2, 16, 32]
    assert found["kept"]


def test_the_engine_samples_the_same_tokens(found):
    assert found["ids"][0] == found["ids"][1] and all(len(ids) > 6 for ids in found["ids"][0])
    assert found["log_probs"] < 1e-4
    whole, part = found["cache"]
    assert part == [whole[0], whole[1] // 4, whole[2] // 2, *whole[3:]]


def test_rings_and_copies_on_eight_devices_are_those_of_one(found):
    assert found["ring"] == [True, False] and found["copied"] == [1, 1, 1]
    assert found["rings"][0] == found["rings"][1] and found["rings_log_probs"] < 1e-4


def test_experts_on_eight_devices_learn_what_they_learn_on_one(found):
    assert found["experts_losses"][1] == pytest.approx(found["experts_losses"][0], abs=1e-5)
    assert found["experts_moved"] > 1e-2 and found["experts_differ"] < 5e-6


def test_the_cache_of_a_device_stays_there(found):
    """Writing by slot once brought every row to every device, once a slot."""
    traffic, cache = found["traffic"]
    assert max(traffic) < cache / 2, f"{traffic} bytes arrive, a cache has {cache}"


def test_learner_and_engine_share_the_devices_from_two_threads(found):
    learnt, sampled, ids = found["beside"]
    assert learnt == 0 and sampled == 0 and ids == found["ids"][1]


def test_placement_compiles_nothing_twice(found):
    assert found["compiled"][0] == found["compiled"][1] and found["compiled"][2] == 1
