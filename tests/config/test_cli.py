"""The command line: picks, overrides, refusals in one line, help."""

import dataclasses

import pytest

from searchrl_jax.config.cli import Invocation, UsageError, parse, read
from searchrl_jax.config.schema import BatchConfig, Experiment


def small(scale: str) -> Experiment:
    if scale not in ("auto", "local"):
        raise ValueError(f"scale: expected auto or local, got {scale!r}; choose one")
    return Experiment(exp="mtrl_search", scale="local", batch=BatchConfig(global_batch_size=12))


def read_line(line: str) -> Invocation:
    return read(line.split(), lambda name: small, ["ablations", "mtrl_search"], prog="tpu", flags={"json": "as JSON"})


def test_exp_alone_gives_the_experiment_of_the_file():
    assert read_line("--exp=mtrl_search") == Invocation(small("auto"), frozenset())
    assert read_line("--exp mtrl_search --scale local --json").flags == {"json"}


@pytest.mark.parametrize(
    "option, group, field, value",
    [
        ("--rl.clip_high_threshold=1.3", "rl", "clip_high_threshold", 1.3),
        ("--rl.clip-high-threshold 1.3", "rl", "clip_high_threshold", 1.3),
        ("--rl.loss_fn=cispo", "rl", "loss_fn", "cispo"),
        ("--rl.advantage-normalization=false", "rl", "advantage_normalization", False),
        ("--rl.advantage-normalization=none", "rl", "advantage_normalization", None),
        ("--rl.value_clip None", "rl", "value_clip", None),
        ("--rl.value_clip=0.5", "rl", "value_clip", 0.5),
        ("--optimizer.remat=true", "optimizer", "remat", True),
        ("--rl.advantage_normalization True", "rl", "advantage_normalization", True),
        ("--optimizer.learning_rate=3e-4", "optimizer", "learning_rate", 3e-4),
        ("--batch.group_size=16", "batch", "group_size", 16),
        ("--evaluation.temperatures 1 0", "evaluation", "temperatures", (1.0, 0.0)),
        ("--evaluation.temperatures=1,0.5", "evaluation", "temperatures", (1.0, 0.5)),
        ("--tracker.project=-a=b", "tracker", "project", "-a=b"),
    ],
)
def test_override_reaches_its_field_with_its_type_and_nothing_else(option, group, field, value):
    experiment = read_line(f"--exp=mtrl_search {option}").experiment
    got = getattr(getattr(experiment, group), field)
    assert got == value and type(got) is type(value)
    before = small("auto")
    changed = dataclasses.replace(getattr(before, group), **{field: value})
    assert experiment == dataclasses.replace(before, **{group: changed})


def test_top_level_fields_are_options_too():
    experiment = read_line("--exp=mtrl_search --seed=3 --time-limit-hours=0.5 --workdir=out").experiment
    assert (experiment.seed, experiment.time_limit_hours, experiment.workdir) == (3, 0.5, "out")


def test_fields_that_depend_on_each_other_change_together():
    experiment = read_line("--exp=mtrl_search --data.corpus=d.jsonl --data.tasks=t.jsonl").experiment
    assert (experiment.data.corpus, experiment.data.tasks) == ("d.jsonl", "t.jsonl")


@pytest.mark.parametrize(
    "options, message",
    [
        ("--rl.clip_hih_threshold=1.3", "did you mean rl.clip_high_threshold"),
        ("--sampling_max_tokens=3", "did you mean sampling.sampling_max_tokens or val.sampling_max_tokens?"),
        ("--jsn", "did you mean json"),
        ("--zzz=1", "see --help"),
        ("--rl.clip_low_threshold=1.3", "rl.clip_low_threshold: expected a number in [0, 1], or none, got 1.3"),
        ("--rl.clip_low_threshold=low", "rl.clip_low_threshold: expected a number in [0, 1], or none, got 'low'"),
        ("--rl.clip_low_threshold=nan", "rl.clip_low_threshold: expected a number in [0, 1], or none, got nan"),
        ("--rl.loss_fn=cispa", "did you mean cispo?"),
        ("--batch.group_size=1.5", "batch.group_size: expected an integer of at least 1, got '1.5'"),
        ("--batch.group_size=none", "batch.group_size: expected an integer of at least 1, got 'none'"),
        ("--batch.group_size=0", "batch.group_size: expected an integer of at least 1, got 0"),
        ("--batch.group_size", "batch.group_size: expected an integer of at least 1, got nothing"),
        ("--batch.group_size 2 3", "got '2 3'"),
        ("--rl.advantage_normalization=maybe", "expected true or false, or none, got 'maybe'"),
        ("--rl.advantage_normalization", "expected true or false, or none, got nothing"),
        ("--lora.lora_rank=4 --lora.lora_targets=q,w", "lora.lora_targets: expected a list, each one of 'q', 'k', 'v'"),
        ("--lora.lora_alpha=32", "lora.lora_alpha: expected 64.0 with lora.lora_rank=0"),
        ("--evaluation.temperatures=1,x", "each a number in [0, 2], got '1 x'"),
        ("--evaluation.temperatures=1,3", "each a number in [0, 2], got (1.0, 3.0)"),
        ("--data.corpus=d.jsonl", "data.tasks: expected a JSONL file of tasks"),
        ("--seed=1 --seed=2", "given twice"),
        ("--seed=1 2", "2: expected an option"),
        ("--json=1", "--json: expected no value"),
        ("--scale=huge", "scale: expected auto or local, got 'huge'"),
    ],
)
def test_refused_with_exit_code_2_and_one_line(options, message, capfd):
    argv = ["--exp=mtrl_search", *options.split()]
    with pytest.raises(SystemExit) as stop:
        parse(argv, lambda name: small, ["ablations", "mtrl_search"], prog="tpu", flags={"json": ""})
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("tpu: error: ") and err.count("\n") == 1
    assert message in err


def test_experiment_must_be_named_and_known():
    with pytest.raises(UsageError, match="did you mean mtrl_search"):
        read_line("--exp=mtrl_serch")
    with pytest.raises(UsageError, match="choose from ablations, mtrl_search"):
        read_line("--seed=1")


def test_help_shows_groups_ranges_and_the_experiments_own_defaults(capfd):
    with pytest.raises(SystemExit) as stop:
        read_line("--exp=mtrl_search --help")
    out, err = capfd.readouterr()
    assert stop.value.code == 0 and err == ""
    assert "batch options" in out and "--batch.global_batch_size INT" in out and "(default: 12)" in out
    assert "--json: as JSON" in out and "Experiments: ablations, mtrl_search." in out


def test_help_needs_no_experiment(capfd):
    with pytest.raises(SystemExit) as stop:
        read_line("-h")
    assert stop.value.code == 0 and "(default: 128)" in capfd.readouterr().out
