"""Reinforcement learning of adapters: the base stands still, and nothing depends on the layout of the rows."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.models.axes import ADAPTED
from searchrl_jax.models.lora import attach, init_adapters
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.rollout.batch import RowShape, Sample, pack
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params
from searchrl_jax.train.learner import Learner
from searchrl_jax.train.state import init_state
from searchrl_jax.train.step import LossSpec, action_log_probs, make_update

V, RANK, SCALE, RATE = 40, 3, 1.5, 1e-2
MODEL = replace(tiny_decoder_config(V, conv_width=0), num_layers=1)
BASE = tiny_params(MODEL, 0)
SHAPE = RowShape(2, 40, 26)


def learner_with(**changes: Any) -> Learner:
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    defaults = {"optimizer.learning_rate": RATE, "lora.lora_rank": RANK, "lora.lora_alpha": SCALE * RANK}
    experiment = with_overrides(Experiment(exp="x", scale="tiny"), defaults | settings)
    return Learner(experiment, MODEL, BASE, (SHAPE,), make_mesh(1, 1, 1, jax.devices()[:1]), steps=5)


def noisy(adapters: Any, seed: int = 5) -> Any:
    """Adapters of which no matrix is 0."""
    leaves, structure = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def groups() -> list[list[Trajectory]]:
    """Two groups of two rollouts of two turns."""
    found = []
    for uid, reward in enumerate((1.0, 0.0, 0.25, 0.5)):
        turn = np.array([-1, -1, -1, *([0] * (uid + 1)), -1, -1, 1, 1], np.int32)
        found.append(
            Trajectory(
                uid=uid,
                task_id="t",
                token_ids=np.random.default_rng(uid).integers(0, V, len(turn)).astype(np.int32),
                is_action=turn >= 0,
                behavior_logprob=np.where(turn >= 0, -3.0, 0.0).astype(np.float32),
                policy_version=np.where(turn >= 0, 0, -1).astype(np.int32),
                turn=turn,
                status="submitted",
                reward=reward,
            )
        )
    return [found[:2], found[2:]]


def changed(one: Any, other: Any) -> dict[str, bool]:
    """Whether each array differs, by path."""
    flat = jax.tree_util.tree_flatten_with_path(jax.tree.map(lambda a, b: not np.array_equal(a, b), one, other))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): found for path, found in flat}


def test_only_adapters_are_trained_and_the_base_is_left_as_it_was() -> None:
    before = jax.tree.map(np.array, BASE)
    learner = learner_with(rl__kl_coef=0.1)
    first = jax.tree.map(np.array, learner.state.params)
    start = learner.merged()
    assert not any(changed(start, before).values())
    rows = [learner.learn(groups(), step) for step in (1, 2, 3)]
    # The first reference is the policy itself: without adapters it is the base, with B = 0 as well.
    assert rows[0]["learner/reference_kl"] == 0 < rows[2]["learner/reference_kl"]
    assert rows[0]["learner/ratio_max"] > 0 and all(np.isfinite(value) for row in rows for value in row.values())
    moved = changed(learner.state.params, first)
    assert moved.keys() == {f"layers/{name}/{part}" for name in ADAPTED for part in "ab"} and all(moved.values())
    assert not any(changed(BASE, before).values())
    attached = learner.params
    assert attached.pop("lora").keys() == {"layers"} and not any(changed(attached, before).values())
    # What a checkpoint holds: A, B and two moments of each, and three counters at the most.
    sizes = sum(leaf.size for leaf in jax.tree.leaves(first))
    kept = sum(leaf.size for leaf in jax.tree.leaves(learner.state))
    assert 3 * sizes < kept <= 3 * sizes + 3
    # Full weights differ in the adapted matrices alone.
    assert {name for name, differs in changed(learner.merged(), before).items() if differs} == {
        f"layers/{name}" for name in ADAPTED
    }


def test_targets_alone_are_adapted() -> None:
    learner = learner_with(lora__lora_targets=("q", "down"))
    learner.state = learner.state.replace(params=noisy(learner.state.params))
    assert {name for name, differs in changed(learner.merged(), BASE).items() if differs} == {"layers/q", "layers/down"}


def test_without_a_rank_all_weights_are_trained() -> None:
    learner = learner_with(lora__lora_rank=0, lora__lora_alpha=64.0)
    assert learner.params is learner.state.params and learner.merged() is learner.state.params
    assert jax.tree.structure(learner.params) == jax.tree.structure(BASE)


def test_the_ratio_raises_the_learning_rate_of_b_alone() -> None:
    """Adam's first step is the learning rate in every coordinate that has a gradient."""
    learner = learner_with(lora__lora_plus_lr_ratio=8.0, rl__proximal_policy="learner")
    learner.state = learner.state.replace(params=noisy(learner.state.params))
    before = jax.tree.map(np.array, learner.state.params)
    metrics = learner.learn(groups(), 1)
    assert metrics["learner/ratio_max"] == pytest.approx(1, abs=1e-4), "what is scored is what is trained"
    for name, pair in learner.state.params["layers"].items():
        for part, rate in (("a", RATE), ("b", 8 * RATE)):
            step = np.abs(pair[part] - before["layers"][name][part])
            assert np.median(step) == pytest.approx(rate, rel=1e-2), (name, part)


def test_the_value_model_is_a_head_on_the_adapted_trunk() -> None:
    learner = learner_with(rl__advantage_method="gae", rl__critic_warmup_steps=1, rl__value_trunk_coef=1.0)
    first = jax.tree.map(np.array, learner.state.params)
    learner.learn(groups(), 1)
    assert not any(changed(learner.state.params, first).values()), "the policy waits for the critic"
    assert all(changed(learner.state.critic.params, jax.tree.map(jnp.zeros_like, learner.state.critic.params)).values())
    metrics = learner.learn(groups(), 2)
    assert metrics["learner/value_loss"] > 0 and any(changed(learner.state.params, first).values())
    assert changed(learner.merged(), BASE)["layers/q"]


def samples() -> list[Sample]:
    """Rows with 1 and with 20 action tokens among others."""
    rng, made = np.random.default_rng(0), []
    for actions in (1, 20, 4, 7, 2, 9):
        is_action = np.arange(actions + 3) > 2
        numbers = rng.normal(size=(2, len(is_action))).astype(np.float32)
        made.append(Sample(rng.integers(0, V, len(is_action)), is_action, 0.2 * numbers[0] - 4, numbers[1]))
    return made


def test_packing_and_micro_batches_change_no_update() -> None:
    adapters = noisy(init_adapters(BASE, ADAPTED, RANK, jax.random.key(1)))
    update = make_update(MODEL, LossSpec("ppo"), optax.sgd(0.1), adapter_scale=SCALE)
    splits = {
        "packed": pack(samples(), [SHAPE]),
        "alone": [batch for sample in samples() for batch in pack([sample], [SHAPE])],
        "turned": pack(samples()[::-1], [SHAPE]),
    }
    found = {}
    for name, batches in splits.items():
        state, metrics = update(init_state(jax.tree.map(jnp.array, adapters), optax.sgd(0.1)), batches, base=BASE)
        found[name] = (jax.device_get(state.params), metrics["loss"])
    assert len(splits["packed"]) < len(splits["alone"]) and all(changed(found["packed"][0], adapters).values())
    for name in ("alone", "turned"):
        assert found[name][1] == pytest.approx(found["packed"][1], abs=1e-6)
        for got, want in zip(*map(jax.tree.leaves, (found[name][0], found["packed"][0])), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=name)


def test_the_engine_samples_from_the_adapters_that_the_learner_scores() -> None:
    params = attach(BASE, noisy(init_adapters(BASE, ADAPTED, RANK, jax.random.key(1))), SCALE)
    engine = Engine(MODEL, Shapes(2, 32, 4, (2,), (8,), (32,)), (3,), jax.random.key(1))
    is_action, stored = {}, {}
    for slot, prompt in enumerate(([5, 6, 7, 8], [9, 10])):
        engine.start(slot, slot, prompt)
        is_action[slot], stored[slot] = [False] * len(prompt), [0.0] * len(prompt)
    for observation in ([20, 21, 22], []):
        engine.flush(params)
        chunk = engine.decode(params, np.array([4, 3]), Sampling())
        for slot, count in enumerate(chunk.count):
            is_action[slot] += [True] * count + [False] * len(observation)
            stored[slot] += chunk.logprobs[slot, :count].tolist() + [0.0] * len(observation)
            engine.extend(slot, observation)
    found = [
        Sample(
            np.array(engine.ids[slot]), np.array(is_action[slot]), np.float32(stored[slot]), np.ones(len(stored[slot]))
        )
        for slot in range(2)
    ]
    (rows,) = pack(found, [SHAPE])
    assert rows.is_action.sum() > 7
    for weights, agree in ((params, True), (BASE, False)):
        scored, _ = action_log_probs(MODEL, weights, rows, temperature=1.0, top_p=1.0)
        gap = np.abs(np.asarray(scored) - rows.behavior_logprob)[rows.is_action].max()
        assert gap < 1e-4 if agree else gap > 0.1
