"""Adapters: what they begin as, what they add, what they learn from, and that merging them changes nothing."""

import functools
import typing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.config.overlays import settings
from searchrl_jax.models.axes import ADAPTED, ADAPTER_AXES
from searchrl_jax.models.cache import init_cache, init_stage, rows_of
from searchrl_jax.models.config import Delta, Experts, Layer
from searchrl_jax.models.decoder import append, decode_step, forward, unembed
from searchrl_jax.models.lora import attach, init_adapters, merge
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params

V, RANK, SCALE = 30, 3, 1.5
CONFIG = tiny_decoder_config(V)
BASE = tiny_params(CONFIG, 0)
TOKENS = np.random.default_rng(0).integers(0, V, (2, 6))
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
SEGMENTS = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 2]])


@jax.jit
def logits(params):
    return unembed(CONFIG, params, forward(CONFIG, params, TOKENS, POSITIONS, SEGMENTS))


def trained(targets=ADAPTED, seed=1):
    """Adapters of which no matrix is 0."""
    fresh = init_adapters(BASE, targets, RANK, jax.random.key(seed))
    leaves, structure = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def test_the_settings_name_what_the_decoder_can_adapt():
    annotation = settings()["lora.lora_targets"].annotation
    assert typing.get_args(typing.get_args(annotation)[0]) == ADAPTED


def test_fresh_adapters_are_the_base_exactly():
    fresh = init_adapters(BASE, ADAPTED, RANK, jax.random.key(1))
    np.testing.assert_array_equal(logits(attach(BASE, fresh, SCALE)), logits(BASE))
    for one, other in zip(jax.tree.leaves(merge(BASE, fresh, SCALE)), jax.tree.leaves(BASE), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_is_uniform_and_b_is_zero_in_every_layer():
    wide = {"layers": {name: jnp.zeros((2, 400, 8, 4)) for name in ADAPTED}}
    fresh = init_adapters(wide, ("q", "down"), 16, jax.random.key(1))["layers"]
    assert fresh.keys() == {"q", "down"}
    for pair in fresh.values():
        assert pair["a"].shape == (2, 400, 16) and pair["b"].shape == (2, 16, 8, 4) and not pair["b"].any()
        assert 0.98 * 400**-0.5 < float(jnp.abs(pair["a"]).max()) <= 400**-0.5
        np.testing.assert_allclose(jnp.std(pair["a"], axis=(1, 2)), (3 * 400) ** -0.5, rtol=0.03)
        assert not np.array_equal(pair["a"][0], pair["a"][1])
    assert not np.array_equal(fresh["q"]["a"], fresh["down"]["a"])
    alone = init_adapters(wide, ("down",), 16, jax.random.key(1))["layers"]
    np.testing.assert_array_equal(alone["down"]["a"], fresh["down"]["a"])


@pytest.mark.parametrize("targets", [(), ("q", "conv_q"), ("embedding",)])
def test_other_targets_are_refused(targets):
    with pytest.raises(ValueError, match="targets: expected some of q, k, v, o, gate, up, down, got"):
        init_adapters(BASE, targets, RANK, jax.random.key(1))


def test_every_adapter_has_a_rule_of_its_rank():
    fresh = init_adapters(BASE, ADAPTED, RANK, jax.random.key(1))
    flat = {"/".join(k.key for k in path): x.ndim for path, x in jax.tree_util.tree_flatten_with_path(fresh)[0]}
    assert flat == {name: len(axes) for name, axes in ADAPTER_AXES.items()}


def test_merged_weights_are_the_formula_in_plain_numpy():
    adapters = trained(("k", "o"))
    before = jax.tree.map(np.array, BASE)
    got = merge(BASE, adapters, SCALE)
    for name in ("k", "o"):
        pair = jax.tree.map(np.array, adapters["layers"][name])
        for layer in range(CONFIG.num_layers):
            w = before["layers"][name][layer]
            want = w.reshape(len(w), -1) + SCALE * pair["a"][layer] @ pair["b"][layer].reshape(RANK, -1)
            np.testing.assert_allclose(got["layers"][name][layer].reshape(len(w), -1), want, rtol=1e-5, atol=1e-6)
    assert got["layers"]["q"] is BASE["layers"]["q"]
    jax.tree.map(np.testing.assert_array_equal, before, BASE)


def test_merged_weights_keep_a_narrow_base_narrow():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), BASE)
    assert {x.dtype for x in jax.tree.leaves(merge(low, trained(), SCALE))} == {jnp.dtype("bfloat16")}
    attached = jax.tree.leaves(attach(low, trained(), SCALE)["lora"])
    assert {x.dtype for x in attached} == {jnp.dtype("float32")}


@pytest.mark.parametrize("targets", [ADAPTED, ("k", "down")])
def test_the_merged_forward_equals_the_adapter_forward(targets):
    adapters = trained(targets)
    got, want = logits(attach(BASE, adapters, SCALE)), logits(merge(BASE, adapters, SCALE))
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
    assert np.abs(want - logits(BASE)).max() > 0.1


def test_appending_and_decoding_read_the_adapters_too():
    adapters = trained()

    @jax.jit
    def cached(params):
        cache = rows_of(init_cache(CONFIG, 2, 16), jnp.arange(2), 16)
        hidden, _ = append(CONFIG, params, cache, TOKENS, jnp.array([6, 6]))
        step, _ = decode_step(
            CONFIG, params, cache, init_stage(cache, 4), jnp.int32(0), TOKENS[:, 0], jnp.ones(2, bool)
        )
        return unembed(CONFIG, params, hidden), step

    attached, merged, base = (cached(p) for p in (attach(BASE, adapters, SCALE), merge(BASE, adapters, SCALE), BASE))
    for got, want, without in zip(attached, merged, base, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
        assert np.abs(want - without).max() > 0.1


@pytest.mark.slow
def test_a_period_of_unlike_layers_has_adapters_by_place():
    config = replace(
        CONFIG,
        num_layers=4,
        conv_width=0,
        pattern=(Layer("delta"), Layer(reads_keys=True)),
        delta=Delta(2, 4, 6, 10, 4),
    )
    base = tiny_params(config, 0)
    fresh = init_adapters(base, ("q", "v", "down"), RANK, jax.random.key(1))
    assert {place: set(pairs) for place, pairs in fresh["layers"].items()} == {
        "0": {"q", "v", "down"},
        "1": {"q", "down"},
    }
    assert not np.array_equal(fresh["layers"]["0"]["down"]["a"], fresh["layers"]["1"]["down"]["a"])
    adapters = jax.tree.map(lambda x: x + 0.1, fresh)
    both = [
        unembed(config, params, forward(config, params, TOKENS, POSITIONS, SEGMENTS))
        for params in (attach(base, adapters, SCALE), merge(base, adapters, SCALE), base)
    ]
    np.testing.assert_allclose(both[0], both[1], atol=1e-4, rtol=1e-4)
    assert np.abs(both[1] - both[2]).max() > 0.1
    sparse = tiny_params(replace(CONFIG, experts=Experts(2, 1)), 0)
    with pytest.raises(ValueError, match="no layer of this decoder has a matrix 'gate'"):
        init_adapters(sparse, ("q", "gate"), RANK, jax.random.key(1))


def test_gradients_follow_from_that_of_the_full_weights():
    """With G the gradient of W': dA = scale * G B^T, dB = scale * A^T G; G is autodiff's of the merged decoder."""
    adapters, targets = trained(), np.random.default_rng(1).normal(size=(2, 6, V))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(assemble, weights):
        return jax.grad(lambda w: jnp.sum(jnp.log(jnp.cosh(logits(assemble(w)) - targets))))(weights)

    full = gradient(lambda w: w, merge(BASE, adapters, SCALE))
    got = gradient(lambda a: attach(BASE, a, SCALE), adapters)
    for name in ADAPTED:
        for layer in range(CONFIG.num_layers):
            g = np.array(full["layers"][name][layer])
            g = g.reshape(len(g), -1)
            a, b = (
                np.array(adapters["layers"][name][part][layer]).reshape(-1, s)
                for part, s in (("a", RANK), ("b", g.shape[1]))
            )
            for part, want in (("a", SCALE * g @ b.T), ("b", SCALE * a.T @ g)):
                found = np.array(got["layers"][name][part][layer]).reshape(want.shape)
                np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=name + part)
