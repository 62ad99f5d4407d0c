"""Plans for TPUs that aren't here: what fits, what doesn't, and what is to blame. Compiling needs libtpu."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from searchrl_jax.models.decoder import init_params
from searchrl_jax.models.hf.outline import parameter_shapes
from searchrl_jax.models.hf.published import DECODERS
from searchrl_jax.models.lora import init_adapters
from searchrl_jax.ops.blockwise import blocks_read
from searchrl_jax.planning.chips import CHIPS
from searchrl_jax.planning.cost import Cost
from searchrl_jax.planning.plan import Compiled, Plan
from searchrl_jax.planning.report import bounds, report, verdict

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None or (ROOT / ".libtpu").is_dir()
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not there: make libtpu")


def plan_command(*options):
    command = [sys.executable, "launch/plan.py", "--exp=mtrl_search", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("path", "billions"),
    [("hf://Qwen/Qwen3.6-27B", 26.9), ("hf://openai/gpt-oss-20b", 20.9), ("hf://google/gemma-4-31B-it", 30.7)],
)
def test_the_published_decoders_have_their_number_of_parameters(path, billions):
    count = sum(int(np.prod(shape)) for shape in parameter_shapes(DECODERS[path]).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.1)


def experiment(scale="qwen3.6-27b", **changes):
    from searchrl_jax.config.cli import experiments
    from searchrl_jax.config.overlays import with_overrides

    load, _ = experiments(ROOT / "experiments", lambda: "local")
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    return with_overrides(load("mtrl_search")(scale), settings)


@pytest.mark.parametrize(("scale", "millions"), [("qwen3.6-27b", 212.9), ("gpt-oss-20b", 15.9), ("gemma-4-31b", 244.9)])
def test_a_published_scale_adapts_matrices_that_its_decoder_has(scale, millions):
    found = experiment(scale)
    base = jax.eval_shape(lambda: init_params(DECODERS[found.model.path], jax.random.key(0)))
    targets, rank = found.lora.lora_targets, found.lora.lora_rank
    adapters = jax.eval_shape(lambda base: init_adapters(base, targets, rank, jax.random.key(0)), base)
    assert sum(x.size for x in jax.tree.leaves(adapters)) / 1e6 == pytest.approx(millions, abs=0.1)


def test_bounds_are_counts_over_rates():
    cost = Cost(459e12, 2765e9 / 2, {"all-gather": 300e9, "all-reduce": 300e9})
    assert bounds(program(cost), CHIPS["v5p"]) == {"arithmetic": 1.0, "memory": 0.5, "links": 1.0}


def program(cost, temporaries=GIB, name="training step", overflow=""):
    largest = [("bf16[16,65536,5120]", 10.0 * GIB, "jit(accumulate)/layers/3/3._attention/dot_general")]
    return Compiled(name, 16 * 65536, 1.0, temporaries, 0.1 * GIB, cost, largest, overflow)


def planned(training=10 * GIB, decoding=GIB, overflow="", **resident):
    cost = Cost(1e15, 1e12, {"all-gather": 1e10})
    mesh = jax.sharding.AbstractMesh((1, 16, 4), ("data", "fsdp", "tensor"))
    programs = (program(cost, training, overflow=overflow), program(cost, decoding, "decoding step"))
    return Plan(mesh, {"base weights": GIB} | resident, programs)


def test_a_plan_that_fits_says_how_much_of_a_chip_it_takes():
    plan = planned()
    fits, words = verdict(plan, CHIPS["v5p"], experiment())
    assert fits and words == "fits: 12% of a chip's memory at most"
    printed = report(plan, CHIPS["v5p"])
    assert "| at most, together | 11.1 of 95.7 |" in printed and "| bound by | arithmetic | arithmetic |" in printed


@pytest.mark.parametrize(
    ("plan", "blamed", "advice"),
    [
        (planned(training=120 * GIB), "temporaries of the training step, 120.0 GiB", "mesh.tensor, 4 now"),
        (planned(training=120 * GIB, overflow="Ran out of memory"), "temporaries of the training", "max_tokens_per_ep"),
        (planned(**{"cache of the rollouts": 99 * GIB}), "cache of the rollouts", "rollout_max_concurrency (96)"),
        (planned(**{"optimizer": 99 * GIB}), "optimizer", "mesh.fsdp"),
    ],
)
def test_a_plan_that_does_not_fit_says_what_is_to_blame_and_what_to_change(plan, blamed, advice):
    fits, words = verdict(plan, CHIPS["v5p"], experiment())
    assert not fits and blamed in words and advice in words.splitlines()[-1]
    if "temporaries" in blamed:
        assert "largest tensor: bf16[16,65536,5120], 10.00 GiB, of jit(accumulate)/layers/3" in words


@pytest.mark.parametrize("window", [None, 1, 512, 513, 1024, 5000])
def test_blocks_that_a_query_looks_at(window):
    length, block = 4000, 512
    seen = []
    for start in range(0, length, block):
        queries = range(start, min(start + block, length))
        seen.append(len({s // block for t in queries for s in range(t + 1) if not window or t - s < window}))
    assert blocks_read(length, window) == pytest.approx(np.mean(seen))


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5p", "v5p:4x", "v5p:4x4x4x4", "v5e:2x2x2", "v6e:0x2"])
def test_a_topology_that_nobody_knows_is_refused(topology):
    done = plan_command("--scale=local", f"--topology={topology}")
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    assert f"got {topology!r}" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "got ''; name a slice"),
        (["--topology"], "--topology: expected one value, got nothing"),
        (["--topology=v5e:2x2", "--topology=v5p:2x2x1"], "--topology: expected once, was given twice"),
        (["--topologie=v5e:2x2"], "did you mean topology?"),
    ],
)
def test_a_command_line_that_cannot_be_carried_out(options, said):
    done = plan_command("--scale=local", *options)
    assert done.returncode == 2 and not done.stdout
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@needs_libtpu
@pytest.mark.slow
def test_the_local_scale_compiles_for_a_slice_and_fits():
    done = plan_command("--scale=local", "--topology=v5e:2x2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 chips of v5e: data 1, fsdp 2, tensor 2" in done.stdout and "fits: " in done.stdout


@needs_libtpu
@pytest.mark.slow
def test_a_mesh_of_another_size_and_a_slice_that_does_not_exist_are_refused():
    for options, what in (
        (["--topology=v5e:2x2", "--mesh.fsdp=3"], "expected a product equal to the 4 devices"),
        (["--topology=v5e:3x7"], "expected a slice that v5e comes in"),
    ):
        done = plan_command("--scale=local", *options)
        assert done.returncode == 2 and what in done.stderr and "Traceback" not in done.stderr
