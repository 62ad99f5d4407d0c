"""Meshes and rules, on one device: what is refused, and what each parameter is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from searchrl_jax.models.axes import CACHE_AXES, PARAMETER_AXES, VALUE_HEAD_AXES
from searchrl_jax.models.cache import init_cache
from searchrl_jax.models.config import Delta, Experts, Layer
from searchrl_jax.models.decoder import init_params
from searchrl_jax.models.value import init_value_head
from searchrl_jax.parallel.mesh import AXES, make_mesh
from searchrl_jax.parallel.rules import RULES, partition_spec, place_rows, row_sharding, tree_shardings
from searchrl_jax.testing.tiny import tiny_decoder_config
from searchrl_jax.train.state import init_state

CONFIG = tiny_decoder_config(60)
EIGHT = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def shapes():
    return jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))


def test_a_mesh_names_its_axes_and_their_type():
    mesh = make_mesh(1, 1, 1)
    assert mesh.axis_names == ("data", "fsdp", "tensor") and dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert mesh.axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((2, 1, 3), "equal to the 1 devices there are, got data 2 \\* fsdp 1 \\* tensor 3 = 6"),
        ((1, 0, 1), "mesh.fsdp: expected at least 1 device, got 0"),
    ],
)
def test_a_mesh_that_the_devices_do_not_make_is_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        make_mesh(*sizes)


def test_every_parameter_has_a_rule_and_every_rule_a_parameter(shapes):
    hybrid = replace(
        CONFIG,
        pattern=(Layer("delta"), Layer()),
        delta=Delta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_width=4),
        has_output_gate=True,
        has_qkv_bias=True,
        has_tied_embedding=False,
    )
    sparse = replace(CONFIG, experts=Experts(2, 1, limit=7.0), has_sinks=True, is_gemma=True)
    found = set(paths(shapes))
    for config in (hybrid, sparse):
        others = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0)))
        tree_shardings(EIGHT, others, PARAMETER_AXES)
        found |= set(paths(others))
        cache = jax.eval_shape(lambda config=config: init_cache(config, 8, 16))
        tree_shardings(EIGHT, cache, CACHE_AXES)
    assert found == set(PARAMETER_AXES)
    head = jax.eval_shape(lambda: init_value_head(CONFIG, jax.random.key(0)))
    assert set(paths(head)) == set(VALUE_HEAD_AXES)
    tree_shardings(EIGHT, head, VALUE_HEAD_AXES)


def paths(tree):
    """Names, without a layer's place in its period."""
    return [
        "/".join(key.key for key in path if not key.key.isdigit())
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def test_large_parameters_are_split_over_fsdp_and_tensor(shapes):
    got = tree_shardings(EIGHT, shapes, PARAMETER_AXES)
    assert got["embedding"].spec == PartitionSpec("tensor", "fsdp")
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        leaf = shapes["layers"][name]
        part = got["layers"][name].shard_shape(leaf.shape)
        assert np.prod(part) * 4 == np.prod(leaf.shape), name
    assert got["final_norm"]["scale"].is_fully_replicated


def test_a_train_state_follows_its_parameters(shapes):
    state = jax.eval_shape(
        lambda p: init_state(p, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))), shapes
    )
    got = tree_shardings(EIGHT, state, PARAMETER_AXES)
    for copy in (got.opt_state[1][0].mu, got.opt_state[1][0].nu):
        assert copy == got.params
    assert got.updates.spec == got.opt_state[1][0].count.spec == PartitionSpec()


def test_a_cache_is_split_by_slot_and_key_head():
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 8, 16))
    got = tree_shardings(EIGHT, cache, CACHE_AXES)
    assert got.k[0].shard_shape(cache.k[0].shape) == (2, 2, 1, 16, 8)
    assert got.conv[0].shard_shape(cache.conv[0].shape) == (2, 2, 3, 32)


def test_a_mesh_axis_is_used_once_in_an_array():
    with pytest.raises(ValueError, match="mesh axis 'tensor' is used twice; give one of the two names another rule"):
        partition_spec(("heads", "ff"))
    with pytest.raises(ValueError, match="mesh axis 'fsdp' is used twice"):
        partition_spec(("rows", "embed"))
    assert partition_spec(("rows", None)) == PartitionSpec(("data", "fsdp"), None)
    with pytest.raises(ValueError, match="got 'width'; give it a rule"):
        partition_spec(("width",))


def test_what_does_not_divide_is_refused_unless_it_is_replicated(shapes):
    mesh = AbstractMesh((1, 1, 4), AXES, axis_types=(AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match="layers/k: expected kv_heads to be a multiple of 4 .*, got 2; choose a mesh"):
        tree_shardings(mesh, shapes, PARAMETER_AXES)
    got = tree_shardings(mesh, shapes, PARAMETER_AXES, {**RULES, "kv_heads": ()})
    assert got["layers"]["k"].is_fully_replicated and not got["layers"]["q"].is_fully_replicated


def test_a_parameter_without_a_rule_is_refused(shapes):
    with pytest.raises(ValueError, match="layers/width: expected a path out of"):
        tree_shardings(EIGHT, {"layers": {"width": shapes["layers"]["gate"]}}, PARAMETER_AXES)
    with pytest.raises(ValueError, match="embedding: expected 2 dimensions"):
        tree_shardings(EIGHT, {"embedding": shapes["layers"]["gate"]}, PARAMETER_AXES)


def test_rows_are_placed_by_their_first_dimension():
    mesh = make_mesh(1, 1, 1)
    placed = place_rows(mesh, {"a": np.zeros((3, 2)), "b": np.zeros(3)})
    assert placed["a"].sharding == row_sharding(mesh) and isinstance(placed["b"], jnp.ndarray)
    with pytest.raises(ValueError, match="expected a multiple of 4 rows .data 2 . fsdp 2., got 6"):
        place_rows(EIGHT, np.zeros((6, 2)))
