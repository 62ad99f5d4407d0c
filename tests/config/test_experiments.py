"""The experiments' own settings."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mtrl_search() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mtrl_search", ROOT / "experiments" / "mtrl_search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("scale", "learning_rate", "dialect"),
    [("qwen3.6-27b", 4e-5, "qwen3_6"), ("gpt-oss-20b", 1e-5, "harmony"), ("gemma-4-31b", 1e-5, "gemma4")],
)
def test_the_big_scales_carry_the_published_hyperparameters(
    mtrl_search: ModuleType, scale: str, learning_rate: float, dialect: str
) -> None:
    found = mtrl_search.config(scale)
    assert (found.exp, found.scale, found.model.dialect) == ("mtrl_search", scale, dialect)
    assert found.model.path.startswith("hf://")
    assert (found.batch.global_batch_size, found.batch.group_size) == (128, 8)
    rl, sampling, optimizer, rollout = found.rl, found.sampling, found.optimizer, found.rollout
    assert (rl.advantage_method, rl.advantage_normalization, rl.loss_fn, rl.gamma) == ("group_based", True, "ppo", 1)
    assert (sampling.temperature, sampling.sampling_top_p, sampling.sampling_max_tokens) == (1, 1, 4096)
    assert (found.lora.lora_rank, found.lora.lora_alpha, optimizer.learning_rate) == (32, 64, learning_rate)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.95, 1e-8)
    assert (optimizer.adam_weight_decay, optimizer.adam_grad_clip_norm, optimizer.learning_rate_end) == (0, 1, 1)
    assert (rollout.rollout_max_concurrency, rollout.rollout_timeout, rollout.rollout_max_retries) == (96, 600, 3)
    assert (rollout.max_steps_off_policy, found.env.max_tokens_per_episode) == (3, 65536)
    assert (found.schedule.max_epochs, found.schedule.max_steps, found.schedule.val_every) == (1, 50, 10)
    assert found.val.temperatures == (0,) and found.val.success_threshold == 1 and found.warmup.steps == 0


def test_a_scale_that_is_not_there_is_named(mtrl_search: ModuleType) -> None:
    with pytest.raises(ValueError, match="local, pretrained, qwen3.6-27b, gpt-oss-20b, gemma-4-31b, got 'huge'"):
        mtrl_search.config("huge")
