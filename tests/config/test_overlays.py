"""Overrides, JSON and comparison of configurations."""

import dataclasses
import json

import pytest

from searchrl_jax.config.overlays import (
    changes,
    differences,
    flatten,
    from_json,
    settings,
    to_json,
    with_overrides,
)
from searchrl_jax.config.schema import RESUMABLE_CHANGES, Experiment


def experiment(**overrides):
    return with_overrides(Experiment(exp="mtrl_search", scale="local"), overrides)


def test_every_leaf_is_a_setting():
    assert list(settings()) == list(flatten(experiment()))


def test_override_leaves_the_original_alone():
    before = experiment()
    after = with_overrides(before, {"rl.loss_fn": "cispo", "rl.clip_high_threshold": 6, "seed": 5})
    assert (after.rl.loss_fn, after.rl.clip_high_threshold, after.seed) == ("cispo", 6, 5)
    assert before == experiment()
    assert with_overrides(before, {}) == before


@pytest.mark.parametrize(
    "name, meant",
    [
        ("rl.los_fn", "rl.loss_fn"),
        ("loss_fn", "rl.loss_fn"),
        ("temperature", "sampling.temperature"),
        ("model.dim", "model.model_dim"),
    ],
)
def test_unknown_name_is_refused_with_a_suggestion(name, meant):
    with pytest.raises(ValueError, match=f"did you mean .*{meant}"):
        with_overrides(experiment(), {name: 1})


def test_a_whole_group_cannot_be_overridden():
    with pytest.raises(ValueError, match="rl: expected the name of a setting"):
        with_overrides(experiment(), {"rl": 1})


def test_json_round_trip_is_exact():
    config = with_overrides(
        experiment(), {"optimizer.learning_rate": 0.1 + 0.2 - 0.3, "evaluation.temperatures": (), "workdir": "läufe/1"}
    )
    stored = json.loads(json.dumps(to_json(config)))
    assert stored == to_json(config)
    assert from_json(stored) == config


def test_stored_configuration_of_another_version_is_refused():
    stored = to_json(experiment())
    stored["rl"]["kl"] = stored["rl"].pop("loss_fn")
    with pytest.raises(ValueError, match=r"unknown fields \['rl.kl'\], missing fields \['rl.loss_fn'\]"):
        from_json(stored)


def test_stored_value_out_of_range_is_refused():
    stored = to_json(experiment())
    stored["batch"]["group_size"] = 0
    with pytest.raises(ValueError, match="batch.group_size: expected an integer of at least 1, got 0"):
        from_json(stored)


def test_differences_name_fields_and_both_values():
    one = to_json(experiment())
    other = to_json(with_overrides(experiment(), {"seed": 1, "rl.loss_fn": "cispo", "evaluation.temperatures": (1.0,)}))
    assert differences(one, one) == []
    assert differences(one, other) == [
        ("seed", 0, 1),
        ("rl.loss_fn", "ppo", "cispo"),
        ("evaluation.temperatures", [1.0, 0.5, 0.0], [1.0]),
    ]


def test_differences_of_versions_and_ignored_names():
    assert differences({"a": 1, "g": {"x": 1}}, {"b": 2, "g": {"x": 1, "y": 0}}) == [
        ("a", 1, None),
        ("g.y", None, 0),
        ("b", None, 2),
    ]
    assert differences({"g": {"x": 1}}, {}) == [("g.x", 1, None)]
    assert differences({"g": {"x": 1, "y": 1}}, {"g": {"x": 2, "y": 2}}, ignore=("g.x",)) == [("g.y", 1, 2)]
    assert differences({"g": {"x": 1, "y": 1}}, {"g": {"x": 2, "y": 2}}, ignore=("g",)) == []


def test_a_setting_that_is_new_may_stand_at_its_default():
    stored = to_json(experiment())
    del stored["model"]["dtype"], stored["rl"]["loss_fn"]
    assert changes(stored, to_json(experiment())) == []
    assert changes(stored, to_json(with_overrides(experiment(), {"rl.loss_fn": "cispo"}))) == [
        ("rl.loss_fn", None, "cispo")
    ]
    assert changes({}, {"documents": "1"}) == [("documents", None, "1")]
    other = to_json(with_overrides(experiment(), {"seed": 1}))
    assert changes(stored, other) == [("seed", 0, 1)] and changes(other | {"gone": 1}, other) == [("gone", 1, None)]


def test_names_that_may_change_on_a_resume_exist():
    top = {field.name for field in dataclasses.fields(Experiment)}
    assert set(RESUMABLE_CHANGES) <= top
