"""The shapes that an experiment compiles for."""

import math

from jax.sharding import Mesh

from searchrl_jax.config.schema import Experiment
from searchrl_jax.rollout.batch import RowShape
from searchrl_jax.rollout.engine import Shapes


def training_rows(experiment: Experiment, mesh: Mesh) -> tuple[RowShape, ...]:
    """The shapes of training rows, ascending.

    Logits are computed for every place of an action token: rows are made for half of what an episode may hold; the rare
    one that holds more has a shape of its own.
    """
    length = experiment.env.max_tokens_per_episode
    actions = min(experiment.env.max_turns * experiment.sampling.sampling_max_tokens, length)
    rows = _shared_out(experiment.batch.micro_batch_rows, mesh)
    return RowShape(rows, length, actions // 2), RowShape(_shared_out(1, mesh), length, actions)


def engine_shapes(experiment: Experiment, mesh: Mesh, overhead: int) -> Shapes:
    """The engine's shapes.

    Args:
        overhead: tokens that the dialect adds to an observation.
    """
    rollout = experiment.rollout
    return Shapes.choose(
        _shared_out(rollout.rollout_max_concurrency, mesh),
        experiment.env.max_tokens_per_episode,
        rollout.decode_chunk,
        experiment.env.observation_tokens + overhead + 1,
    )


def _shared_out(rows: int, mesh: Mesh) -> int:
    """`rows`, rounded up to as many on every device that rows are spread over."""
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    return shares * math.ceil(rows / shares)
