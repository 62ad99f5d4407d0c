"""Run by `test_sharded.py` in a process of its own with 8 virtual devices: prints what it found as JSON."""

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.models.axes import ADAPTED, ADAPTER_AXES, CACHE_AXES, PARAMETER_AXES, VALUE_HEAD_AXES
from searchrl_jax.models.config import Experts, Layer
from searchrl_jax.models.decoder import init_params
from searchrl_jax.models.lora import init_adapters
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.parallel.rules import place_rows, replicated, tree_shardings
from searchrl_jax.planning.cost import cost_of
from searchrl_jax.planning.hlo import parse
from searchrl_jax.rollout.batch import RowShape, Sample, pack
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params
from searchrl_jax.train.learner import Learner
from searchrl_jax.train.state import init_state
from searchrl_jax.train.step import LossSpec, make_update

CONFIG = tiny_decoder_config(60)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
PARAMS = jax.device_get(tiny_params(CONFIG, 0))
OF_RINGS = replace(CONFIG, pattern=(Layer(window=6), Layer()), conv_width=0)
RINGS = jax.device_get(tiny_params(OF_RINGS, 0))


def batches():
    rng = np.random.default_rng(0)
    samples = []
    for length in rng.integers(8, 24, 18):
        is_action = rng.random(length) < 0.5
        is_action[0], is_action[-1] = False, True
        log_probs = np.full(length, -4.0, np.float32)
        samples.append(Sample(rng.integers(0, 60, length), is_action, log_probs, rng.normal(size=length)))
    return pack(samples, [RowShape(4, 40, 30)])


def train(mesh, device=None):
    state = init_state(jax.tree.map(jnp.array, PARAMS), OPTIMIZER)
    rows = batches()
    if mesh is not None:
        state = jax.device_put(state, tree_shardings(mesh, state, PARAMETER_AXES))
        rows = [place_rows(mesh, batch) for batch in rows]
    update = make_update(CONFIG, LossSpec("ppo"), OPTIMIZER, device=device)
    before = jax.tree.map(lambda x: x.sharding, state)
    losses = []
    for _ in range(2):
        state, metrics = update(state, rows)
        losses.append(metrics["loss"])
    kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, before)
    return jax.device_get(state.params), losses, all(jax.tree.leaves(kept)), state


def ragged():
    """Rows with 1 and with 90 action tokens, and everything that a loss can read of them."""
    rng = np.random.default_rng(1)
    samples = []
    for actions in (1, 90, 7, 90, 1, 30):
        is_action = np.arange(actions + 3) > 2
        numbers = rng.normal(size=(6, len(is_action))).astype(np.float32)
        numbers[:3] = 0.3 * numbers[:3] - 4  # log-probabilities
        behavior, proximal, reference, advantage, value, target = numbers
        ids = rng.integers(0, 60, len(is_action))
        samples.append(Sample(ids, is_action, behavior, advantage, None, proximal, reference, value, target))
    return pack(samples, [RowShape(4, 100, 92)])


SPEC = LossSpec(
    "ppo",
    aggregation="sequence_mean",
    has_reference=True,
    kl_coef=0.3,
    entropy_coef=0.1,
    value_clip=0.2,
    value_trunk_coef=0.5,
)
HEAD = {"value": {"kernel": np.full((CONFIG.model_dim, 1), 0.1, np.float32), "bias": np.ones(1, np.float32)}}


def full_step(mesh):
    """Parameters of policy and value model after one plain gradient step on the whole loss, and the loss."""
    optimizer = optax.sgd(0.1)
    state = init_state(jax.tree.map(jnp.array, PARAMS), optimizer, jax.tree.map(jnp.array, HEAD), optimizer)
    rows, shardings = ragged(), None
    if mesh is not None:
        shardings = tree_shardings(mesh, state, {**PARAMETER_AXES, **VALUE_HEAD_AXES})
        state = jax.device_put(state, shardings)
        rows = [place_rows(mesh, batch) for batch in rows]
    update = make_update(CONFIG, SPEC, optimizer, shardings, value_optimizer=optimizer)
    state, metrics = update(state, rows)
    return jax.device_get((state.params, state.critic.params)), metrics["loss"]


ADAPTERS = jax.tree.map(lambda x: np.array(x) + 0.1, init_adapters(PARAMS, ADAPTED, 3, jax.random.key(4)))


def adapter_step(mesh):
    """The state after one plain gradient step on the adapters, and the loss."""
    optimizer = optax.sgd(0.1)
    state, base = init_state(jax.tree.map(jnp.array, ADAPTERS), optimizer), PARAMS
    rows, shardings = batches(), None
    if mesh is not None:
        shardings = tree_shardings(mesh, state, ADAPTER_AXES)
        state = jax.device_put(state, shardings)
        base = jax.device_put(base, tree_shardings(mesh, base, PARAMETER_AXES))
        rows = [place_rows(mesh, batch) for batch in rows]
    update = make_update(CONFIG, LossSpec("ppo"), optimizer, shardings, adapter_scale=2.0)
    state, metrics = update(state, rows, base=base)
    return state, metrics["loss"]


EXPERTS = dataclasses.replace(
    CONFIG, experts=Experts(count=5, chosen=2, limit=7.0), pattern=(Layer(window=3), Layer()), has_sinks=True
)
OF_EXPERTS = jax.tree.map(lambda x: np.array(x) + 0.01, jax.device_get(init_params(EXPERTS, jax.random.key(3))))


def experts_step(mesh):
    """Parameters of a decoder with experts after one plain gradient step, and the loss."""
    optimizer = optax.sgd(0.1)
    state, rows, shardings = init_state(jax.tree.map(jnp.array, OF_EXPERTS), optimizer), batches(), None
    if mesh is not None:
        shardings = tree_shardings(mesh, state, PARAMETER_AXES)
        state = jax.device_put(state, shardings)
        rows = [place_rows(mesh, batch) for batch in rows]
    update = make_update(EXPERTS, LossSpec("ppo"), optimizer, shardings)
    state, metrics = update(state, rows)
    return jax.device_get(state.params), metrics["loss"]


def rollouts():
    """Two groups of four rollouts of several turns and lengths, one of one token and one of 26."""
    rng, found = np.random.default_rng(7), []
    for uid, lengths in enumerate([(3, 2), (1,), (4, 9, 13), (6,), (1, 4), (2,), (5, 5, 5), (7, 1)]):
        turn = np.array([-1] * 3 + [n for t, length in enumerate(lengths) for n in [t] * length + [-1] * 2][:-2])
        acts = turn >= 0
        logprob = np.where(acts, -4 + 0.3 * rng.normal(size=len(turn)), 0).astype(np.float32)
        ids, version = rng.integers(0, 60, len(turn)).astype(np.int32), np.where(acts, 0, -1).astype(np.int32)
        reward = float(rng.random())
        found.append(Trajectory(uid, "t", ids, acts, logprob, version, turn.astype(np.int32), "submitted", reward))
    return [found[:4], found[4:]]


def learned(mesh):
    """Parameters of policy and value model after a step of all that a learner can compute, and its numbers."""
    settings = {
        "rl.advantage_method": "gae",
        "rl.proximal_policy": "learner",
        "rl.importance_weight": "sequence",
        "rl.loss_aggregation": "constant",
        "rl.dual_clip": 3.0,
        "rl.kl_coef": 0.1,
        "rl.kl_in": "reward",
        # Of Adam's first step only the sign would be left, which rounding may turn.
        "optimizer.adam_eps": 1e-2,
        "optimizer.learning_rate": 1e-2,
    }
    experiment = with_overrides(Experiment(exp="x", scale="tiny"), settings)
    learner = Learner(experiment, CONFIG, jax.tree.map(jnp.array, PARAMS), (RowShape(4, 48, 30),), mesh, steps=2)
    metrics = learner.learn(rollouts(), 1)
    return jax.device_get((learner.state.params, learner.state.critic.params)), metrics


def largest(one, other):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, other)))


def sample(mesh, device=None, config=CONFIG, params=PARAMS):
    """Rollouts of which two on one device begin alike, and one on another device does, too."""
    shapes = Shapes(8, 40, 4, (4, 8), (12,), (64,))
    run, sharding = jax.random.key(2), None
    if mesh is not None:
        cache = jax.eval_shape(lambda: shapes.empty_cache(config))
        sharding = tree_shardings(mesh, cache, CACHE_AXES)
        params = jax.device_put(params, tree_shardings(mesh, params, PARAMETER_AXES))
        run = jax.device_put(run, replicated(mesh))
    engine = Engine(config, shapes, (3,), run, sharding)
    long = list(range(5, 25))
    for slot, prompt in enumerate(([5, 6, 7, 8], [9, 10], [11] * 13, [12, 13, 14], long, long, long, [15])):
        engine.start(slot, slot, prompt)
    log_probs, device = [], device or FairLock()
    for observation in ([20, 21, 22], [23, 24], []):
        with device:
            engine.flush(params)
            chunk = engine.decode(params, np.array([4, 2, 4, 4] * 2), Sampling(0.8, 0.95))
        log_probs.append(np.where(np.arange(4) < chunk.count[:, None], chunk.logprobs, 0))
        for slot in (0, 2):
            engine.extend(slot, observation)
    return engine, np.stack(log_probs)


def beside(mesh):
    """What a thread that samples and one that learns find, both on the same devices."""
    device = FairLock()
    with ThreadPoolExecutor(1) as pool:
        sampled = pool.submit(sample, mesh, device)
        return train(mesh, device), sampled.result()


def engine_traffic(mesh):
    """Bytes that reach a device from others in one append, one chunk of decoding and one copy; those of its cache."""
    shapes = Shapes(8, 400, 4, (8,), (12,), (400,))
    cache = jax.eval_shape(lambda: shapes.empty_cache(CONFIG))
    sharding = tree_shardings(mesh, cache, CACHE_AXES)
    params = jax.device_put(PARAMS, tree_shardings(mesh, PARAMS, PARAMETER_AXES))
    engine = Engine(CONFIG, shapes, (3,), jax.device_put(jax.random.key(2), replicated(mesh)), sharding)
    rows = [np.zeros((8, 12), np.int32), np.zeros(8, np.int32), np.arange(8, dtype=np.int32)]
    of_slots = [np.zeros(8, np.uint32), *[np.zeros(8, np.int32)] * 3]
    lowered = (
        engine._append.lower(params, engine.cache, *rows, bucket=400),
        engine._decode.lower(params, engine.cache, engine.run_key, *of_slots, bucket=400, temperature=1.0, top_p=1.0),
        engine._copy.lower(engine.cache, *of_slots[1:], bucket=400),
    )
    traffic = [sum(cost_of(parse(low.compile().as_text())).collective_bytes.values()) for low in lowered]
    return traffic, sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(engine.cache))


def main():
    mesh = make_mesh(2, 2, 2)
    one, eight = train(None), train(mesh)
    alone, spread = sample(None), sample(mesh)
    ring_alone, ring_spread = (sample(m, None, OF_RINGS, RINGS) for m in (None, mesh))
    trained_beside, sampled_beside = beside(mesh)
    whole = [full_step(m) for m in (None, make_mesh(1, 2, 1, jax.devices()[:2]), mesh)]
    (alone_lora, loss_alone), (spread_lora, loss_spread) = adapter_step(None), adapter_step(mesh)
    experts_alone, experts_spread = experts_step(None), experts_step(mesh)
    one_device, two = (make_mesh(1, n, 1, jax.devices()[:n]) for n in (1, 2))
    learners = [learned(m) for m in (one_device, two, mesh)]
    parts = {name: spread_lora.params["layers"][name] for name in ("q", "down")}
    gate, k = eight[3].params["layers"]["gate"], spread[0].cache.k[0]
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one[0], PARAMS)
    differ = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one[0], eight[0])
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "losses": [one[1], eight[1]],
                "moved": min(jax.tree.leaves(moved)),
                "differ": max(jax.tree.leaves(differ)),
                "kept": eight[2],
                "full_losses": [loss for _, loss in whole],
                "full_moved": largest(whole[0][0], (PARAMS, HEAD)),
                "full_differ": [largest(whole[0][0], params) for params, _ in whole[1:]],
                "learner_moved": largest(learners[0][0][0], PARAMS),
                "learner_differ": [largest(learners[0][0], params) for params, _ in learners[1:]],
                "learner_metrics": [
                    {name: value for name, value in metrics.items() if name.startswith("learner/")}
                    for _, metrics in learners
                ],
                "experts_losses": [experts_alone[1], experts_spread[1]],
                "experts_moved": largest(experts_alone[0], OF_EXPERTS),
                "experts_differ": largest(experts_alone[0], experts_spread[0]),
                "adapter_losses": [loss_alone, loss_spread],
                "adapters_moved": largest(jax.device_get(alone_lora.params), ADAPTERS),
                "adapters_differ": largest(*map(jax.device_get, (alone_lora.params, spread_lora.params))),
                "adapter_parts": [
                    list(parts[name][part].addressable_shards[0].data.shape) for name in parts for part in "ab"
                ],
                "gate": [list(gate.shape), list(gate.addressable_shards[0].data.shape)],
                "moment": list(eight[3].opt_state[1][0].mu["layers"]["gate"].addressable_shards[0].data.shape),
                "ids": [alone[0].ids, spread[0].ids],
                "traffic": engine_traffic(mesh),
                "beside": [
                    largest(eight[0], trained_beside[0]),
                    float(np.abs(spread[1] - sampled_beside[1]).max()),
                    sampled_beside[0].ids,
                ],
                "log_probs": float(np.abs(alone[1] - spread[1]).max()),
                "cache": [list(k.shape), list(k.addressable_shards[0].data.shape)],
                "rings": [list(engine.ids) for engine, _ in (ring_alone, ring_spread)],
                "rings_log_probs": float(np.abs(ring_alone[1] - ring_spread[1]).max()),
                "ring": list(ring_spread[0].cache.is_ring),
                "copied": [engine._copy._cache_size() for engine, _ in (alone, spread, ring_spread)],
                "compiled": [
                    spread[0]._append._cache_size(),
                    alone[0]._append._cache_size(),
                    spread[0]._decode._cache_size(),
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
