"""Every setting of an experiment: its name, default, range and meaning.

Names, defaults and meanings of the training groups are those of the published multi-turn RL service, so that its
recipes can be read here. Its ranges are not: limits such as "batches of 32, 64 or 128 prompts" or "timeouts from 300 s"
are a product's, and a run on two CPU cores lies outside them. A range here excludes only what has no meaning.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from searchrl_jax.config.checks import Checked, within


@dataclass(frozen=True)
class BatchConfig(Checked):
    """How many rollouts make a training step."""

    group: ClassVar[str] = "batch"
    global_batch_size: int = field(default=128, metadata=within(1))
    """Unique prompts per training step."""
    group_size: int = field(default=8, metadata=within(1))
    """Rollouts per prompt; the group is the baseline of its members, so a group of one has no advantage."""
    micro_batch_rows: int = field(default=1, metadata=within(1))
    """Training rows, each as long as the longest episode may be, that one gradient computation takes; rounded up to the
    same number on all devices that share rows."""


@dataclass(frozen=True)
class RLConfig(Checked):
    """From rewards to the policy gradient."""

    group: ClassVar[str] = "rl"
    advantage_method: Literal[
        "monte_carlo",
        "group_based",
        "group_based_per_turn",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "opo",
        "grpo_passk",
        "gpg",
        "gae",
    ] = "group_based"
    """Advantage estimator; group_based is GRPO's, gae needs no group and trains a value model beside the policy."""
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = "ppo"
    """Policy-gradient loss."""
    clip_low_threshold: float | None = field(default=None, metadata=within(0, 1))
    """Lower bound on the ratio new policy / proximal policy: the bound itself, not a distance from 1; none for the
    loss's own (ppo 0.8, cispo 0)."""
    clip_high_threshold: float | None = field(default=None, metadata=within(1))
    """Upper bound on the ratio; none for the loss's own (ppo 1.2, cispo 4)."""
    dual_clip: float | None = field(default=None, metadata=within(1, above=True))
    """With ppo, bound on the ratio where the advantage is negative; none for no such bound."""
    advantage_normalization: bool | None = None
    """Divide advantages by their standard deviation; none for the estimator's own habit."""
    gamma: float = field(default=1.0, metadata=within(0, 1))
    """Discount of later rewards, per turn; with gae per action token."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Average over action tokens: each counts alike, or each trajectory does, or each token counts as one of the
    trajectory's token budget."""
    minibatches: int = field(default=1, metadata=within(1))
    """Gradient steps that one batch of rollouts is split into."""
    refill_groups: int = field(default=0, metadata=within(0))
    """Tries to make up for groups with nothing to train by as many fresh prompts, on top of the epoch's; 0 for none."""
    proximal_policy: Literal["sampler", "learner"] = "sampler"
    """Whose log-probabilities the ratio is taken to: the sampler's as recorded, or the learner's at the start of the
    step (decoupled PPO)."""
    importance_weight: Literal["none", "token", "sequence"] = "none"
    """With proximal_policy=learner, weight learner / sampler on the loss of each token: of the token, or of its whole
    trajectory."""
    importance_cap: float | None = field(default=2.0, metadata=within(1))
    """Upper bound on that weight; none for no bound."""
    kl_coef: float = field(default=0.0, metadata=within(0))
    """Weight of the divergence from the reference, which is the base policy; 0 for none."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that divergence from a sampled token; none for k3 in the loss, and for k1 in the reward, where the
    others have no gradient near the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence is charged: as a term of the loss, or off the reward of the turn."""
    entropy_coef: float = field(default=0.0, metadata=within(-1, 1))
    """Entropy bonus (nats per action token) in the loss; below 0 a penalty, which sharpens the policy."""
    gae_lambda: float = field(default=1.0, metadata=within(0, 1))
    """With gae, decay of the traces; 1 takes whole returns."""
    value_clip: float | None = field(default=0.2, metadata=within(0, above=True))
    """With gae, most that a step may move a value before the loss no longer rewards it; none for no bound."""
    value_trunk_coef: float = field(default=0.0, metadata=within(0))
    """With gae, weight of the value loss in the gradient of the decoder that the policy shares; 0 stops it."""
    critic_warmup_steps: int = field(default=0, metadata=within(0))
    """With gae, first steps that train the value model alone."""

    @property
    def divergence(self) -> Literal["k1", "k2", "k3"]:
        """The estimator in use."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    def check(self) -> None:
        """A setting that another one leaves unread is refused, lest a run be taken for what it is not."""
        bounds = (self.clip_low_threshold, self.clip_high_threshold)
        if self.loss_fn == "importance_sampling" and bounds != (None, None):
            raise ValueError(
                "rl.clip_low_threshold, rl.clip_high_threshold: expected none with rl.loss_fn=importance_sampling, "
                f"which has no bounds, got {bounds}; leave them out or choose another loss"
            )
        if self.dual_clip is not None and self.loss_fn != "ppo":
            raise ValueError(
                f"rl.dual_clip: expected none with rl.loss_fn={self.loss_fn}, got {self.dual_clip}; choose ppo for it"
            )
        if self.dual_clip is not None and self.dual_clip <= (self.clip_high_threshold or 1.2):
            raise ValueError(
                f"rl.dual_clip: expected more than rl.clip_high_threshold, got {self.dual_clip}; raise it (3 is usual)"
            )
        if self.importance_weight != "none" and self.proximal_policy != "learner":
            raise ValueError(
                f"rl.importance_weight: expected none with rl.proximal_policy={self.proximal_policy}, whose ratio is "
                f"the whole correction already, got {self.importance_weight}; set rl.proximal_policy=learner"
            )
        method = self.advantage_method
        if self.gamma != 1 and method not in ("monte_carlo", "reinforce_pp", "group_based_per_turn", "gae"):
            raise ValueError(
                f"rl.gamma: expected 1 with rl.advantage_method={method}, which judges the trajectory as a whole, "
                f"got {self.gamma}; choose a method that credits turns"
            )
        of_gae = (
            ("critic_warmup_steps", self.critic_warmup_steps, 0),
            ("gae_lambda", self.gae_lambda, 1.0),
            ("value_trunk_coef", self.value_trunk_coef, 0.0),
        )
        for name, value, default in of_gae:
            if method != "gae" and value != default:
                raise ValueError(
                    f"rl.{name}: expected {default} with rl.advantage_method={method}, which has no value model, got "
                    f"{value}; choose gae for it"
                )


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """How training rollouts are sampled."""

    group: ClassVar[str] = "sampling"
    temperature: float = field(default=1.0, metadata=within(0, 2, above=True))
    """Sampling temperature; above 0, since a greedy rollout has no behaviour probability to learn from."""
    sampling_top_p: float = field(default=1.0, metadata=within(0, 1, above=True))
    """Nucleus cutoff."""
    sampling_max_tokens: int = field(default=4096, metadata=within(1))
    """Cap on the tokens of one turn; an episode whose turn reaches it has failed."""


@dataclass(frozen=True)
class ValConfig(Checked):
    """Validation during training."""

    group: ClassVar[str] = "val"
    temperatures: tuple[float, ...] = field(default=(1.0, 0.0), metadata=within(0, 2))
    """Sampling temperatures, each validated at; 0 is greedy decoding. The first one's metrics are `val/`."""
    sampling_top_p: float = field(default=1.0, metadata=within(0, 1, above=True))
    """Nucleus cutoff."""
    sampling_max_tokens: int = field(default=0, metadata=within(0))
    """Cap on the tokens of one turn; 0 for that of the training rollouts."""
    val_group_size: int = field(default=1, metadata=within(1))
    """Rollouts per validation task."""
    pass_k_values: tuple[int, ...] = field(default=(1, 2, 4, 8, 16, 32), metadata=within(1))
    """Tries k that pass@k and pass^k are measured for; those above val_group_size are left out."""
    success_threshold: float = field(default=1.0, metadata=within(-1, 1))
    """Reward from which a rollout counts as a success."""
    val_batch_size: int = field(default=0, metadata=within(0))
    """Validation tasks to use, always the same ones, of each slice its share; 0 for all of them."""
    val_at_start: bool = True
    """Validate once before the first step, as the curve's baseline."""


@dataclass(frozen=True)
class ScheduleConfig(Checked):
    """How long to train, and what happens every so many steps."""

    group: ClassVar[str] = "schedule"
    max_epochs: int = field(default=1, metadata=within(1))
    """Passes over the training tasks, each with fresh rollouts."""
    max_steps: int = field(default=50, metadata=within(0))
    """Most training steps; training ends at whichever of the two limits comes first. 0 evaluates the base alone."""
    val_every: int = field(default=10, metadata=within(0))
    """Steps between validations; 0 for none."""
    save_every: int = field(default=1, metadata=within(1))
    """Steps between checkpoints."""


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Adam with decoupled weight decay and clipping by global norm."""

    group: ClassVar[str] = "optimizer"
    learning_rate: float = field(default=4e-5, metadata=within(0, 1e-2, above=True))
    """Learning rate of reinforcement learning at its first step."""
    learning_rate_end: float = field(default=1.0, metadata=within(0, 1))
    """Learning rate at the last step, as a share of the first; linear in between. 1 keeps it constant."""
    adam_beta1: float = field(default=0.9, metadata=within(0, 0.999999))
    """Decay of the gradient's running mean."""
    adam_beta2: float = field(default=0.95, metadata=within(0, 0.999999))
    """Decay of the squared gradient's running mean."""
    adam_eps: float = field(default=1e-8, metadata=within(1e-16, 1e-2))
    """Added to the root of the second moment."""
    adam_weight_decay: float = field(default=0.0, metadata=within(0, 1))
    """Decoupled weight decay, as in AdamW."""
    adam_grad_clip_norm: float = field(default=1.0, metadata=within(0, 100))
    """Largest global gradient norm; 0 for no clipping."""
    value_learning_rate: float = field(default=1e-3, metadata=within(0, 1e-1, above=True))
    """Constant learning rate of the value model; the rest of its optimizer is as the policy's."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """How Adam's two running means are stored between updates; bfloat16 halves their memory."""
    remat: bool = False
    """In reinforcement learning, compute each block of the decoder again in the backward pass in place of keeping its
    activations: a third more work, and memory for one block in place of all."""

    def check(self) -> None:
        """What bfloat16 stores must change by more than it rounds."""
        if self.state_dtype == "bfloat16" and self.adam_beta2 > 0.99:
            raise ValueError(
                f"optimizer.adam_beta2: expected at most 0.99 with optimizer.state_dtype=bfloat16, whose 8 bits lose "
                f"smaller changes of a running mean, got {self.adam_beta2}; lower it or store float32"
            )


@dataclass(frozen=True)
class LoraConfig(Checked):
    """Low-rank adapters, trained by reinforcement learning in the place of the base's weights."""

    group: ClassVar[str] = "lora"
    lora_rank: int = field(default=0, metadata=within(0))
    """Rank of the adapters; 0 for full fine-tuning."""
    lora_alpha: float = field(default=64.0, metadata=within(0, above=True))
    """The product of the two adapter matrices counts alpha / rank times."""
    lora_targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = (
        "q",
        "k",
        "v",
        "o",
        "gate",
        "up",
        "down",
    )
    """Matrices of each block that have adapters."""
    lora_plus_lr_ratio: float = field(default=1.0, metadata=within(0, above=True))
    """Learning rate of B, which begins at 0, over that of A (LoRA+); 1 for one learning rate."""

    def check(self) -> None:
        """Targets are distinct, and a setting of adapters needs adapters."""
        targets = self.lora_targets
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(
                f"lora.lora_targets: expected one matrix or more, each once, got {','.join(targets)!r}; "
                "lora.lora_rank=0 is what trains without adapters"
            )
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if not self.lora_rank and value != each.default:
                raise ValueError(
                    f"lora.{each.name}: expected {each.default} with lora.lora_rank=0, which has no adapters, got "
                    f"{value}; set a rank (32 is usual)"
                )


@dataclass(frozen=True)
class RolloutConfig(Checked):
    """The engine that plays episodes."""

    group: ClassVar[str] = "rollout"
    rollout_max_concurrency: int = field(default=96, metadata=within(1))
    """Rollouts in flight: the slots of the engine; rounded up to the same number on all devices that share rows."""
    rollout_timeout: float = field(default=600.0, metadata=within(0, above=True))
    """Seconds after which a rollout counts as failed."""
    rollout_max_retries: int = field(default=3, metadata=within(0))
    """Tries more that a rollout gets after its tools failed, before it is masked and counted."""
    max_failed_share: float = field(default=0.1, metadata=within(0, 1))
    """Share of the latest rollouts whose tools may have failed for good; past it the run stops."""
    max_steps_off_policy: int = field(default=3, metadata=within(0))
    """Training steps that the oldest weights behind a trained trajectory may lag; 0 plays and updates in turns."""
    decode_chunk: int = field(default=16, metadata=within(1))
    """Tokens that live slots decode between two looks at finished turns and waiting observations."""


@dataclass(frozen=True)
class DataConfig(Checked):
    """Documents and tasks."""

    group: ClassVar[str] = "data"
    corpus: str = "pydocs"
    """`pydocs` for the embedded corpus, or the path of a JSONL file of documents."""
    tasks: str = ""
    """Path of a JSONL file of tasks; empty for the embedded corpus, which brings its own."""
    mixing: tuple[str, ...] = ()
    """Weight of each dataset among the training prompts, as in `frames=2,musique=1`; empty takes tasks as they come."""
    mixing_field: str = "dataset"
    """Metadata field of a task that names its dataset."""
    curriculum: bool = False
    """Draw training tasks by their measured pass rate, most often those passed half of the time."""
    curriculum_threshold: float = field(default=0.5, metadata=within(-1, 1))
    """Reward from which a rollout counts as passed."""
    bm25_stemmer: str = ""
    """Snowball stemmer of the lexical index, such as english; empty for none."""
    bm25_lead_weight: int = field(default=0, metadata=within(0, 1000))
    """How many times more a title and the first twelve words of a text count in the lexical index; 0 for plain BM25."""
    vector_index: Literal["scann", "exact"] = "scann"
    """How the vector index searches; exact needs no ScaNN and no AVX2."""

    def check(self) -> None:
        """A corpus of one's own needs tasks of one's own, and the embedded corpus takes none. Weights are readable."""
        mixing_weights(self.mixing)
        if self.corpus != "pydocs" and not self.tasks:
            raise ValueError(f"data.tasks: expected a JSONL file of tasks over {self.corpus!r}, got ''; name one")
        if self.corpus == "pydocs" and self.tasks:
            raise ValueError(
                f"data.tasks: expected '' with the embedded corpus, got {self.tasks!r}; "
                "name its documents in data.corpus"
            )


def mixing_weights(mixing: tuple[str, ...]) -> dict[str, float] | None:
    """The weight of each dataset that `data.mixing` names; None where it names none.

    Raises:
        ValueError: an entry is not `NAME=WEIGHT` with a finite weight of at least 0, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for entry in mixing:
        name, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not 0 <= weight < math.inf:
            raise ValueError(
                f"data.mixing: expected NAME=WEIGHT with a weight of at least 0 and each name once, got {entry!r} "
                f"in {','.join(mixing)!r}; write it as frames=2,musique=1"
            )
        weights[name] = weight
    return weights or None


@dataclass(frozen=True)
class EnvConfig(Checked):
    """Limits and observations of the search environment."""

    group: ClassVar[str] = "env"
    max_turns: int = field(default=8, metadata=within(1))
    """Turns of the policy in one episode, the submitting one included."""
    max_tokens_per_episode: int = field(default=65536, metadata=within(1))
    """Tokens of prompt, turns and observations together."""
    results_per_search: int = field(default=5, metadata=within(1))
    """Documents that one search shows."""
    observation_words: int = field(default=24, metadata=within(0))
    """Words of a document's text that an observation shows."""
    observation_tokens: int = field(default=256, metadata=within(16))
    """Token budget of one observation."""
    see_also: int = field(default=4, metadata=within(0))
    """Names of linked documents that an observation shows for each result."""
    keep_observations: int = field(default=0, metadata=within(0))
    """Last observations that stay in the history; a placeholder stands for older ones. 0 keeps all."""
    malformed_reward: float = field(default=0.0, metadata=within(-10, 0))
    """Added to the reward for each turn that is no call; estimators that credit turns charge it to that turn."""
    tool_timeout: float = field(default=10.0, metadata=within(0, 1e6, above=True))
    """Seconds after which a tool call counts as a failure of the tool."""


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The decoder: a pretrained one, or the shape of one that is trained from nothing."""

    group: ClassVar[str] = "model"
    path: str = ""
    """Checkpoint to begin with, which brings its shape and its tokenizer: a folder in Hugging Face format, a .gguf file
    or hf://OWNER/NAME; empty for a decoder of the shape below, trained from nothing."""
    dialect: Literal["hermes", "qwen3", "qwen3_6", "harmony", "gemma4", "plain"] = "hermes"
    """How turns and calls are written: hermes by decoders trained from nothing, by a pretrained one as its family does
    it; plain fits any that has an end token."""
    num_layers: int = field(default=4, metadata=within(1))
    """Decoder blocks."""
    model_dim: int = field(default=192, metadata=within(1))
    """Width of the residual stream."""
    ff_dim: int = field(default=512, metadata=within(1))
    """Width of the feed-forward layer."""
    num_heads: int = field(default=6, metadata=within(1))
    """Query heads."""
    num_kv_heads: int = field(default=2, metadata=within(1))
    """Key and value heads; divides num_heads."""
    head_dim: int = field(default=32, metadata=within(2))
    """Size of one head; even, since rotary embeddings turn pairs."""
    vocab_size: int = field(default=2048, metadata=within(1))
    """Entries of the tokenizer that is trained, and rows of the embedding."""
    rope_theta: float = field(default=1e6, metadata=within(1, above=True))
    """Base of the rotary embedding's wavelengths."""
    conv_width: int = field(default=4, metadata=within(0))
    """Taps of the causal convolution on what keys are made of; 0 for none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, activations and caches; bfloat16 is for a frozen base with adapters, which stay float32."""

    def check(self) -> None:
        """A checkpoint has its own shape and dialect. Heads share out evenly, and their size is even."""
        if bool(self.path) == (self.dialect == "hermes"):
            expected = "the dialect of its family, or plain," if self.path else "hermes"
            raise ValueError(
                f"model.dialect: expected {expected} with model.path={self.path!r}, got {self.dialect}; correct one of "
                "the two"
            )
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if self.path and each.name not in ("path", "dialect", "dtype") and value != each.default:
                raise ValueError(
                    f"model.{each.name}: expected {each.default} with a checkpoint, which has a shape of its own, got "
                    f"{value}; leave it out, or choose a scale that sets none, such as pretrained"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads: expected a divisor of model.num_heads = {self.num_heads}, "
                f"got {self.num_kv_heads}; change one of the two"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim: expected an even integer, got {self.head_dim}; rotary pairs need one")


@dataclass(frozen=True)
class WarmupConfig(Checked):
    """Behaviour cloning of a scripted demonstrator of mixed quality: it makes the base agent."""

    group: ClassVar[str] = "warmup"
    steps: int = field(default=0, metadata=within(0))
    """Updates of behaviour cloning; 0 begins reinforcement learning with the weights as they are."""
    path: str = ""
    """Run directory whose base agent is taken in place of a warm-up, for runs that differ in what comes after it."""
    copy_steps: int = field(default=0, metadata=within(0))
    """First of these updates, which take random sequences, each repeated, in place of demonstrations."""
    scrambled: float = field(default=0.0, metadata=within(0, 1))
    """Share of demonstrations whose words are replaced by others, the same throughout an episode."""
    learning_rate: float = field(default=1e-3, metadata=within(0, 1, above=True))
    """Peak learning rate of behaviour cloning."""
    lazy: float = field(default=0.0, metadata=within(0, 1))
    """Share of demonstrations that stop after one search."""
    slips: float = field(default=0.0, metadata=within(0, 1))
    """Share of queries that break off with a few wrong tokens, read but not imitated, and are written again."""
    rambling: float = field(default=0.0, metadata=within(0, 1))
    """Share of demonstrations that search on until the turn limit."""
    overlong: float = field(default=0.0, metadata=within(0, 1))
    """Share of demonstrations with a turn that runs into the token limit."""

    def check(self) -> None:
        """Shares of imperfect demonstrations sum to at most 1: the rest are good. Copying is part of the warm-up."""
        if self.copy_steps > self.steps:
            raise ValueError(
                f"warmup.copy_steps: expected at most warmup.steps = {self.steps}, got {self.copy_steps}; lower it"
            )
        total = self.lazy + self.rambling + self.overlong
        if total > 1:
            raise ValueError(
                f"warmup.lazy + warmup.rambling + warmup.overlong: expected at most 1, got {total:g}; lower one of them"
            )


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """The comparison on test tasks that ends a run."""

    group: ClassVar[str] = "evaluation"
    temperatures: tuple[float, ...] = field(default=(1.0, 0.5, 0.0), metadata=within(0, 2))
    """Temperatures at which base and tuned agent are compared, each once; 0 is greedy decoding."""
    tasks: int = field(default=0, metadata=within(0))
    """Test tasks to use, of each slice its share; 0 for all of them."""
    bootstrap_samples: int = field(default=10000, metadata=within(1))
    """Resamples behind each interval and each permutation p-value."""

    def check(self) -> None:
        """Temperatures are distinct, as they are written in the names of files."""
        if len({f"{temperature:g}" for temperature in self.temperatures}) < len(self.temperatures):
            raise ValueError(
                f"evaluation.temperatures: expected each once, got {self.temperatures}; leave the repeated ones out"
            )


@dataclass(frozen=True)
class TrackerConfig(Checked):
    """Where metrics go beside the run directory."""

    group: ClassVar[str] = "tracker"
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether metrics are mirrored to Weights & Biases, and whether it uses the network."""
    project: str = "searchrl_jax"
    """Project under which the mirror files the run."""


@dataclass(frozen=True)
class MeshConfig(Checked):
    """Devices along each axis of the mesh; their product is the number of devices used."""

    group: ClassVar[str] = "mesh"
    data: int = field(default=1, metadata=within(1))
    """Copies of the parameters, each with its share of the batch."""
    fsdp: int = field(default=1, metadata=within(1))
    """Devices that share the parameters and the batch."""
    tensor: int = field(default=1, metadata=within(1))
    """Devices that share heads and feed-forward width."""


@dataclass(frozen=True)
class Experiment(Checked):
    """All settings of one run."""

    exp: str
    """Name of the experiment's file in experiments/."""
    scale: str
    """Scale of the experiment that these settings are for; experiments/README.md lists them."""
    seed: int = field(default=0, metadata=within(0, 2**31 - 1))
    """Every random choice of the run follows from it."""
    workdir: str = ""
    """Run directory; empty for runs/EXP."""
    time_limit_hours: float = field(default=24.0, metadata=within(0, above=True))
    """Hours after which the run checkpoints and ends; the same command goes on from there."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val: ValConfig = field(default_factory=ValConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def check(self) -> None:
        """A group has rollouts to compare. A batch is filled up by playing on, which those ahead do not wait for. What
        is trained is float32."""
        method = self.rl.advantage_method
        if self.batch.group_size == 1 and method not in ("monte_carlo", "reinforce_pp", "gae"):
            raise ValueError(
                f"batch.group_size: expected at least 2 with rl.advantage_method={method}, which learns from how the "
                "rollouts of one task differ, got 1; raise it, or choose monte_carlo, reinforce_pp or gae"
            )
        if self.model.dtype == "bfloat16" and (self.warmup.steps or self.warmup.path or not self.lora.lora_rank):
            raise ValueError(
                "model.dtype: expected float32 where the base itself is trained, got bfloat16, which rounds small "
                "steps off; set warmup.steps=0 and lora.lora_rank above 0, or model.dtype=float32"
            )
        bound = self.rollout.max_steps_off_policy
        if self.rl.refill_groups and bound:
            raise ValueError(
                f"rl.refill_groups: expected 0 with rollout.max_steps_off_policy={bound}, got {self.rl.refill_groups}; "
                "play in turns (rollout.max_steps_off_policy=0), or fill nothing up"
            )


# What may change between a run and its continuation: none of these can change a sampled token or a parameter.
RESUMABLE_CHANGES = ("workdir", "time_limit_hours", "tracker")
