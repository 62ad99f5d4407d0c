"""A training step and a decoding step of an experiment, compiled for a TPU topology that isn't here."""

import glob
import importlib.util
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from searchrl_jax.config.schema import Experiment
from searchrl_jax.models.axes import ADAPTER_AXES, CACHE_AXES, PARAMETER_AXES, VALUE_HEAD_AXES
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import init_params
from searchrl_jax.models.dtype import held_in
from searchrl_jax.models.hf.load import open_checkpoint
from searchrl_jax.models.hf.outline import outline
from searchrl_jax.models.hf.published import DECODERS
from searchrl_jax.models.lora import attach, init_adapters
from searchrl_jax.ops.blockwise import blocks_read
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.parallel.rules import replicated, row_sharding, tree_shardings
from searchrl_jax.planning.chips import CHIPS
from searchrl_jax.planning.cost import Cost, cost_of, largest_temporaries
from searchrl_jax.planning.hlo import parse
from searchrl_jax.rollout.batch import RowShape, fill
from searchrl_jax.rollout.engine import Sampling, Shapes, decode_program
from searchrl_jax.train.learner import loss_spec, policy_optimizer
from searchrl_jax.train.shapes import engine_shapes, training_rows
from searchrl_jax.train.state import init_state
from searchrl_jax.train.step import make_programs, no_sums, weights_of
from searchrl_jax.train.workspace import shape_of

DIALECT_TOKENS = 32  # that a dialect adds to an observation, at most


@dataclass(frozen=True)
class Compiled:
    """One program, compiled.

    Attributes:
        tokens: that one run of it trains or samples, on all chips together.
        seconds: that compiling took.
        temporaries, code: bytes on each chip beside what is passed in.
        cost: of one run on each chip.
        largest: the largest temporary arrays of a chip: shape, bytes, and where in the model they come from.
        overflow: the compiler's own words where the program doesn't fit in a chip's memory; what it says of cost and
            temporaries is then of the program that it gave up.
    """

    name: str
    tokens: int
    seconds: float
    temporaries: float
    code: float
    cost: Cost
    largest: Sequence[tuple[str, float, str]]
    overflow: str = ""


@dataclass(frozen=True)
class Plan:
    """What each chip of the mesh holds all the time, by kind in bytes, and the programs that it runs."""

    mesh: Mesh
    resident: dict[str, float]
    programs: Sequence[Compiled]

    @property
    def peak(self) -> float:
        """Bytes that a chip needs at most."""
        return sum(self.resident.values()) + max(each.temporaries + each.code for each in self.programs)


def devices_of(topology: str) -> tuple[str, Sequence[Any]]:
    """The generation and the devices of a topology such as v5p:4x4x4, none of which need exist.

    Raises:
        ValueError: there is no such topology, or libtpu isn't installed.
    """
    generation, _, shape = topology.partition(":")
    chip = CHIPS.get(generation)
    if chip is None or not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{chip.dimensions - 1}}}", shape):
        known = ", ".join(f"{name} ({each.dimensions} dimensions)" for name, each in CHIPS.items())
        raise ValueError(
            f"topology: expected GENERATION:SHAPE, as in v5e:4x4 or v5p:4x4x4, of {known}, got {topology!r}; "
            "name a slice"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("expected libtpu, which compiles for TPUs, found none; fetch it: make libtpu")
    try:
        return generation, topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"topology: expected a slice that {generation} comes in, got {topology!r}: {first}") from error


def decoder_of(experiment: Experiment) -> DecoderConfig:
    """The decoder that the experiment trains, without its weights.

    Raises:
        ValueError: its checkpoint isn't there or isn't known here.
    """
    model = experiment.model
    if model.path in DECODERS:
        return DECODERS[model.path]
    if model.path:
        return outline(open_checkpoint(model.path).config).decoder
    return shape_of(model, model.vocab_size)


def choose_mesh(experiment: Experiment, decoder: DecoderConfig, devices: Sequence[Any]) -> Mesh:
    """The experiment's mesh or, where it names none, one for all `devices`.

    Heads, feed-forward width and vocabulary are shared out over up to 8 devices, as far as they divide, and the model
    width over the rest.

    Raises:
        ValueError: the experiment's mesh is for another number of devices.
    """
    given, count = experiment.mesh, len(devices)
    if (given.data, given.fsdp, given.tensor) != (1, 1, 1):
        return make_mesh(given.data, given.fsdp, given.tensor, devices)
    sizes = [layer.num_kv_heads for layer in decoder.period if layer.kind == "attention"]
    sizes += [decoder.ff_dim, decoder.vocab_size, *([decoder.delta.num_key_heads] if decoder.delta else [])]
    tensor = max(n for n in (1, 2, 4, 8) if count % n == 0 and all(size % n == 0 for size in sizes))
    fsdp = math.gcd(decoder.model_dim, count // tensor)
    return make_mesh(count // tensor // fsdp, fsdp, tensor, devices)


def make_plan(
    experiment: Experiment,
    decoder: DecoderConfig,
    mesh: Mesh,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the gradient of one micro-batch and one chunk of decoding, as a run compiles them.

    Args:
        say: told what comes next.
    """
    weights = _weights(experiment, decoder, mesh)
    base, state = weights
    shapes = engine_shapes(experiment, mesh, DIALECT_TOKENS)
    dtype = jnp.dtype(experiment.model.dtype)
    cache = jax.eval_shape(lambda: shapes.empty_cache(decoder, dtype))
    cache = _placed(cache, tree_shardings(mesh, cache, CACHE_AXES))
    trained = weights_of(state)
    resident = {
        "base weights": _bytes(base),
        "trained weights": _bytes(trained),
        "gradients": _bytes(trained),
        "optimizer": _bytes(state) - _bytes(trained),
        # While new weights are handed over the old ones are still at play.
        "weights of the rollouts": 2 * _bytes(trained) if experiment.rollout.max_steps_off_policy else 0.0,
        "reference": _bytes(trained) if experiment.rl.kl_coef and base is None else 0.0,
        "cache of the rollouts": _bytes(cache),
    }
    row = training_rows(experiment, mesh)[0]
    say(f"compiling a training step: {row.rows} rows of {row.length:,} tokens, {row.actions:,} of them actions")
    training = _training(experiment, decoder, mesh, row, base, state)
    say(f"compiling a decoding step: {shapes.slots} rollouts, {shapes.chunk} tokens each after {shapes.capacity:,}")
    decoding = _decoding(experiment, decoder, mesh, shapes, base, state, cache)
    return Plan(mesh, {name: size for name, size in resident.items() if size}, (training, decoding))


def _weights(experiment: Experiment, decoder: DecoderConfig, mesh: Mesh) -> tuple[Any, Any]:
    """The frozen base (None without adapters) and the state of training, as placed shapes."""
    dtype, lora, key = jnp.dtype(experiment.model.dtype), experiment.lora, jax.random.key(0)
    base = jax.eval_shape(lambda: held_in(init_params(decoder, key), dtype))
    base = _placed(base, tree_shardings(mesh, base, PARAMETER_AXES))
    optimizer = policy_optimizer(experiment, experiment.schedule.max_steps)

    def begin(base: Any) -> Any:
        trained = init_adapters(base, lora.lora_targets, lora.lora_rank, key) if lora.lora_rank else base
        return init_state(trained, optimizer)

    state = jax.eval_shape(begin, base)
    axes = {**PARAMETER_AXES, **ADAPTER_AXES, **VALUE_HEAD_AXES}
    return base if lora.lora_rank else None, _placed(state, tree_shardings(mesh, state, axes))


def _training(
    experiment: Experiment, decoder: DecoderConfig, mesh: Mesh, row: RowShape, base: Any, state: Any
) -> Compiled:
    spec = loss_spec(experiment, [row])
    shardings = jax.tree.map(lambda x: x.sharding, state)
    programs = make_programs(
        decoder,
        spec,
        policy_optimizer(experiment, experiment.schedule.max_steps),
        shardings,
        remat=experiment.optimizer.remat,
        adapter_scale=experiment.lora.lora_alpha / max(experiment.lora.lora_rank, 1),
    )
    sums = jax.eval_shape(lambda state: no_sums(spec, state), state)
    of_gradients, of_metrics = programs.sum_shardings
    sums = (_placed(sums[0], of_gradients), _placed(sums[1], jax.tree.map(lambda _: of_metrics, sums[1])))
    rows = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, fill([], row)))
    rows = _placed(rows, jax.tree.map(lambda _: row_sharding(mesh), rows))
    windows = [layer.window for layer in decoder.period]

    def open_trips(op_name: str) -> float:
        place = re.search(r"layers/(\d+)/", op_name)
        return blocks_read(row.length, windows[int(place.group(1)) if place else 0])

    lowered = programs.accumulate.lower(weights_of(state), sums, rows, base)
    return _compiled("training step", lowered, row.rows * row.length, open_trips)


def _decoding(
    experiment: Experiment, decoder: DecoderConfig, mesh: Mesh, shapes: Shapes, base: Any, state: Any, cache: Any
) -> Compiled:
    program = decode_program(decoder, shapes, (0,), jax.tree.map(lambda x: x.sharding, cache))
    params = state.params
    if base is not None:
        params = jax.eval_shape(lambda base, adapters: attach(base, adapters, 1.0), base, state.params)
        placed = {**base, "lora": {"layers": state.params["layers"]}}
        params = _placed(params, jax.tree.map(lambda x: x.sharding, placed))
    sampling = Sampling(experiment.sampling.temperature, experiment.sampling.sampling_top_p)
    slots = [jax.ShapeDtypeStruct((shapes.slots,), dtype) for dtype in (np.uint32, *[np.int32] * 3)]
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh))
    lowered = program.lower(
        params,
        cache,
        key,
        *slots,
        bucket=shapes.key_buckets[-1],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
    return _compiled("decoding step", lowered, shapes.slots * shapes.chunk)


def _compiled(
    name: str, lowered: Any, tokens: int, open_trips: Callable[[str], float] = lambda op_name: 1.0
) -> Compiled:
    """Compiles, and reads what the compiler wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        began, overflow, memory = time.perf_counter(), "", None
        try:
            memory = lowered.compile(compiler_options={"xla_dump_to": folder}).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            overflow = str(error).splitlines()[0]
        seconds = time.perf_counter() - began
        (written,) = glob.glob(f"{glob.escape(folder)}/*.after_optimizations.txt")
        program = parse(Path(written).read_text())
    needed = re.search(r"\(([\d.]+)([GMK])\)", overflow)
    temporaries = (
        float(needed.group(1)) * {"G": 2**30, "M": 2**20, "K": 2**10}[needed.group(2)]
        if needed
        else float(memory.temp_size_in_bytes if memory else math.inf)
    )
    return Compiled(
        name,
        tokens,
        seconds,
        temporaries,
        float(memory.generated_code_size_in_bytes) if memory else 0.0,
        cost_of(program, open_trips=open_trips),
        [(str(shape), shape.bytes, each.op_name) for shape, each in largest_temporaries(program)],
        overflow,
    )


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _bytes(tree: Any) -> float:
    """On one device."""
    return float(
        sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.size)
    )
