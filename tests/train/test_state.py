"""The optimizer's options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.config.schema import OptimizerConfig
from searchrl_jax.train.state import init_state, lora_plus, make_optimizer

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}


def after(config, steps=20):
    optimizer = make_optimizer(config, 10)
    state = init_state(PARAMS, optimizer)
    params, opt_state = state.params, state.opt_state
    for step in range(steps):
        grads = jax.tree.map(lambda x: 0.1 * x + 0.01 * (step % 3), params)  # noqa: B023
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, opt_state


def test_bfloat16_state_is_stored_so_and_trains_nearly_the_same():
    wide, wide_state = after(OptimizerConfig(learning_rate=1e-2))
    narrow, narrow_state = after(OptimizerConfig(learning_rate=1e-2, state_dtype="bfloat16"))
    kinds = {leaf.dtype for leaf in jax.tree.leaves(narrow_state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert kinds == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype("float32")}
    assert jax.tree.structure(wide_state) == jax.tree.structure(narrow_state)
    for a, b, start in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_allclose(a - start, b - start, rtol=0.02)
        assert not np.array_equal(a, b)


def test_a_learning_rate_of_its_own_replaces_the_policy_s():
    config = OptimizerConfig(learning_rate=1e-3, adam_grad_clip_norm=0)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    for given, used in ((None, 1e-3), (0.05, 0.05)):
        optimizer = make_optimizer(config, 10, given)
        updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates["w"], -used, rtol=1e-5)


def test_lora_plus_scales_the_updates_of_b_alone_weight_decay_included():
    pair = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([0.5, 3.0])}
    adapters = {"layers": {"q": pair, "k": jax.tree.map(jnp.negative, pair)}}
    plain = make_optimizer(OptimizerConfig(learning_rate=1e-2, learning_rate_end=0.5, adam_weight_decay=0.1), 4)
    assert lora_plus(plain, 1.0) is plain
    faster = lora_plus(plain, 16.0)
    states = [plain.init(adapters), faster.init(adapters)]
    assert len(jax.tree.leaves(states[0])) == len(jax.tree.leaves(states[1]))
    for step in range(3):
        grads = jax.tree.map(lambda x: 0.1 * x + step, adapters)  # noqa: B023
        (want, states[0]), (got, states[1]) = (
            each.update(grads, state, adapters) for each, state in zip((plain, faster), states, strict=True)
        )
        for name in ("q", "k"):
            np.testing.assert_array_equal(got["layers"][name]["a"], want["layers"][name]["a"])
            np.testing.assert_array_equal(got["layers"][name]["b"], 16 * want["layers"][name]["b"])
            assert np.all(np.asarray(want["layers"][name]["b"]) != 0)


@pytest.mark.parametrize("with_critic", [False, True])
def test_the_value_model_has_a_state_of_its_own(with_critic):
    optimizer = make_optimizer(OptimizerConfig(), 10)
    head = {"value": {"kernel": jnp.zeros((3, 1))}} if with_critic else None
    state = init_state(PARAMS, optimizer, head, optimizer if with_critic else None)
    assert (state.critic is not None) == with_critic
    # Without one a checkpoint holds what it always held.
    count = len(jax.tree.leaves(init_state(PARAMS, optimizer)))
    assert (len(jax.tree.leaves(state)) > count) == with_critic
