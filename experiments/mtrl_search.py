"""Multi-turn RL of a search agent: the main experiment, at the scale that the machine allows.

Scale `local` (49 minutes on 2 CPU cores that were busy with other work; 25 on quiet ones is the aim): a decoder of 2 M
parameters, trained here from nothing on the reference pages of the installed numeric packages. Behaviour cloning of a
scripted demonstrator of mixed quality makes the base agent; group-relative PPO on nDCG@10 tunes it. README.md shows the
table of a run, docs/study.md what the recipe rests on and where it falls short.

    python launch/tpu.py --exp=mtrl_search
"""

from searchrl_jax.config.schema import (
    BatchConfig,
    DataConfig,
    EnvConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    RLConfig,
    RolloutConfig,
    SamplingConfig,
    ScheduleConfig,
    ValConfig,
    WarmupConfig,
)

SCALES = ("local",)


def config(scale: str) -> Experiment:
    """The experiment at `scale`.

    Raises:
        ValueError: there is no such scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: expected auto or one of {', '.join(SCALES)}, got {scale!r}; choose one of these")
    return Experiment(
        exp="mtrl_search",
        scale=scale,
        batch=BatchConfig(global_batch_size=12, group_size=8, micro_batch_rows=2),
        rl=RLConfig(minibatches=2, advantage_normalization=False, entropy_coef=-0.4),
        sampling=SamplingConfig(sampling_max_tokens=64),
        val=ValConfig(temperatures=(1.0,)),
        schedule=ScheduleConfig(max_steps=24, val_every=12, save_every=5),
        optimizer=OptimizerConfig(learning_rate=3e-4, learning_rate_end=0.0),
        rollout=RolloutConfig(rollout_max_concurrency=32, decode_chunk=16, max_steps_off_policy=0),
        data=DataConfig(bm25_lead_weight=4),
        env=EnvConfig(
            max_turns=5,
            max_tokens_per_episode=768,
            observation_words=4,
            observation_tokens=140,
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
