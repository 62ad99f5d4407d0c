"""Ranges, types and rules of the settings."""

import dataclasses
import math
import typing

import pytest

from searchrl_jax.config.checks import accepts, without_none
from searchrl_jax.config.overlays import settings
from searchrl_jax.config.schema import (
    BatchConfig,
    DataConfig,
    EvaluationConfig,
    Experiment,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RLConfig,
    SamplingConfig,
    TrackerConfig,
    WarmupConfig,
    mixing_weights,
)


def test_published_defaults():
    experiment = Experiment(exp="x", scale="local")
    assert (experiment.batch.global_batch_size, experiment.batch.group_size) == (128, 8)
    assert (experiment.rl.advantage_method, experiment.rl.loss_fn) == ("group_based", "ppo")
    # None: the loss's own, 0.8 and 1.2 with ppo; the estimator's own.
    assert (experiment.rl.clip_low_threshold, experiment.rl.clip_high_threshold) == (None, None)
    assert experiment.rl.advantage_normalization is None and experiment.rl.gamma == 1
    assert (experiment.sampling.temperature, experiment.sampling.sampling_top_p) == (1, 1)
    assert experiment.sampling.sampling_max_tokens == 4096
    schedule = experiment.schedule
    assert (schedule.max_epochs, schedule.max_steps, schedule.val_every, schedule.save_every) == (1, 50, 10, 1)
    adam = experiment.optimizer
    assert (adam.learning_rate, adam.adam_beta1, adam.adam_beta2, adam.adam_eps) == (4e-5, 0.9, 0.95, 1e-8)
    assert (adam.adam_weight_decay, adam.adam_grad_clip_norm) == (0, 1)
    lora = experiment.lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_plus_lr_ratio) == (0, 64, 1)
    rollout = experiment.rollout
    assert (rollout.rollout_max_concurrency, rollout.rollout_timeout, rollout.rollout_max_retries) == (96, 600, 3)
    assert experiment.time_limit_hours == 24


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: RLConfig(clip_low_threshold=1.3),
            r"rl.clip_low_threshold: expected a number in \[0, 1\], or none, got 1",
        ),
        (lambda: RLConfig(clip_low_threshold=math.nan), "got nan"),
        (lambda: RLConfig(clip_high_threshold=math.inf), "rl.clip_high_threshold: expected a number of at least 1"),
        (
            lambda: RLConfig(clip_high_threshold=0.9),
            "rl.clip_high_threshold: expected a number of at least 1, or none, got",
        ),
        (lambda: RLConfig(loss_fn="dpo"), "rl.loss_fn: expected one of 'importance_sampling', 'ppo', 'cispo', got"),
        (lambda: RLConfig(minibatches=True), "rl.minibatches: expected an integer of at least 1, got True"),
        (lambda: RLConfig(minibatches=2.0), "rl.minibatches: expected an integer"),
        (lambda: RLConfig(advantage_normalization=1), "rl.advantage_normalization: expected true or false, or none"),
        (
            lambda: RLConfig(loss_fn="importance_sampling", clip_high_threshold=1.2),
            "which has no bounds, got .None, 1.2",
        ),
        (
            lambda: RLConfig(loss_fn="cispo", dual_clip=3.0),
            "rl.dual_clip: expected none with rl.loss_fn=cispo, got 3.0",
        ),
        (lambda: RLConfig(clip_high_threshold=4.0, dual_clip=3.0), "rl.dual_clip: expected more than rl.clip_high"),
        (lambda: RLConfig(dual_clip=1.1), "rl.dual_clip: expected more than rl.clip_high"),
        (lambda: RLConfig(importance_weight="token"), "rl.importance_weight: expected none with rl.proximal_policy=sa"),
        (lambda: RLConfig(gamma=0.9), "rl.gamma: expected 1 with rl.advantage_method=group_based"),
        (
            lambda: RLConfig(critic_warmup_steps=3),
            "rl.critic_warmup_steps: expected 0 with rl.advantage_method=group_ba",
        ),
        (lambda: RLConfig(gae_lambda=0.9), "rl.gae_lambda: expected 1.0 .* got 0.9; choose gae for it"),
        (
            lambda: OptimizerConfig(state_dtype="bfloat16", adam_beta2=0.999),
            "optimizer.adam_beta2: expected at most 0.99",
        ),
        (lambda: LoraConfig(lora_rank=-1), "lora.lora_rank: expected an integer of at least 0, got -1"),
        (lambda: LoraConfig(lora_rank=4, lora_alpha=0.0), "lora.lora_alpha: expected a number above 0, got 0.0"),
        (
            lambda: LoraConfig(lora_rank=4, lora_targets=("q", "conv_q")),
            "lora.lora_targets: expected a list, each one of",
        ),
        (lambda: LoraConfig(lora_rank=4, lora_targets=()), "lora.lora_targets: expected one matrix or more, .* got ''"),
        (lambda: LoraConfig(lora_rank=4, lora_targets=("q", "q")), "each once, got 'q,q'; lora.lora_rank=0 is what"),
        (lambda: LoraConfig(lora_alpha=32.0), "lora.lora_alpha: expected 64.0 with lora.lora_rank=0, .* got 32.0; set"),
        (lambda: LoraConfig(lora_targets=("q",)), "lora.lora_targets: expected .* with lora.lora_rank=0, which has no"),
        (lambda: LoraConfig(lora_plus_lr_ratio=16.0), "lora.lora_plus_lr_ratio: expected 1.0 with lora.lora_rank=0"),
        (lambda: OptimizerConfig(learning_rate=0.0), r"optimizer.learning_rate: expected a number in \(0, 0.01\]"),
        (lambda: SamplingConfig(temperature=0.0), r"sampling.temperature: expected a number in \(0, 2\], got 0.0"),
        (lambda: TrackerConfig(project=3), "tracker.project: expected a string, got 3"),
        (lambda: EvaluationConfig(temperatures=(0.5, 0.50000001)), "evaluation.temperatures: expected each once"),
        (lambda: EvaluationConfig(temperatures=[1.0]), "evaluation.temperatures: expected a list, each a number"),
        (lambda: Experiment(exp="x", scale="local", seed=-1), "^seed: expected an integer in"),
        (lambda: Experiment(exp="x", scale="local", rl="ppo"), "rl: expected an instance of .*RLConfig.*, got 'ppo'"),
        (
            lambda: Experiment(exp="x", scale="local", batch=BatchConfig(group_size=1)),
            "batch.group_size: expected at least 2 with rl.advantage_method=group_based",
        ),
        (
            lambda: Experiment(exp="x", scale="local", rl=RLConfig(refill_groups=1)),
            "rl.refill_groups: expected 0 with rollout.max_steps_off_policy=3, got 1",
        ),
        (lambda: ModelConfig(num_heads=6, num_kv_heads=4), "model.num_kv_heads: expected a divisor of"),
        (lambda: ModelConfig(head_dim=33), "model.head_dim: expected an even integer, got 33"),
        (lambda: WarmupConfig(lazy=0.6, overlong=0.6), "warmup.overlong: expected at most 1, got 1.2"),
        (lambda: DataConfig(mixing=("a=1", "b")), "data.mixing: expected NAME=WEIGHT .* got 'b' in 'a=1,b'"),
        (lambda: DataConfig(mixing=("a=-1",)), "got 'a=-1'"),
        (lambda: DataConfig(mixing=("a=1", "a=2")), "each name once, got 'a=2'"),
        (lambda: DataConfig(mixing=("=1",)), "got '=1'"),
        (lambda: DataConfig(corpus="docs.jsonl"), "data.tasks: expected a JSONL file of tasks over 'docs.jsonl'"),
        (lambda: DataConfig(tasks="tasks.jsonl"), "data.tasks: expected '' with the embedded corpus"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name, setting in settings().items() if "range" in setting.metadata])
def test_every_range_holds_at_both_ends_and_not_beyond(name):
    setting = settings()[name]
    low, high, above = setting.metadata["range"]
    annotation, is_optional = without_none(setting.annotation)
    kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is tuple else annotation
    assert accepts(None, setting.annotation, setting.metadata) is is_optional
    values = [(low, not above), (low - 1, False)]
    if not math.isinf(high):
        values += [(high, True), (high + 1, False)]
    for value, inside in values:
        # the ends are written as integers where they are whole; a field of floats takes them as either
        candidate = kind(value)
        candidate = (candidate,) if kind is not annotation else candidate
        assert accepts(candidate, setting.annotation, setting.metadata) is inside


def test_mixing_weights_are_read_as_written():
    assert mixing_weights(()) is None
    assert mixing_weights(("frames=2", "a=b=0.5", "c=0")) == {"frames": 2.0, "a=b": 0.5, "c": 0.0}


def test_an_integer_passes_for_a_number():
    assert RLConfig(clip_low_threshold=1).clip_low_threshold == 1


def test_settings_are_frozen_and_every_field_has_a_meaning():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RLConfig().minibatches = 2
    for field in dataclasses.fields(Experiment):
        if dataclasses.is_dataclass(field.type):
            assert field.type.group == field.name
