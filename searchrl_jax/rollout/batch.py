"""Training rows: trajectories packed into a few fixed shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Rows:
    """A micro-batch. Several trajectories may share a row, told apart by `segment_ids`; padding has id 0.

    What the loss needs is laid out by action token, so that logits are computed where a loss is taken and nowhere else:
    `target[b, a]` is the index in row b of its a-th action token, which is predicted from the token before it.
    """

    token_ids: Int[Array, "B L"]
    positions: Int[Array, "B L"]
    segment_ids: Int[Array, "B L"]
    target: Int[Array, "B A"]
    is_action: Bool[Array, "B A"]
    behavior_logprob: Float[Array, "B A"]
    advantage: Float[Array, "B A"]


@dataclass(frozen=True)
class RowShape:
    """Rows of `length` tokens with at most `actions` action tokens, `rows` to a micro-batch."""

    rows: int
    length: int
    actions: int


@dataclass(frozen=True)
class Sample:
    """What the learner takes from one trajectory. `advantage` is per token; it is read at action tokens only."""

    token_ids: Int[np.ndarray, " L"]
    is_action: Bool[np.ndarray, " L"]
    behavior_logprob: Float[np.ndarray, " L"]
    advantage: Float[np.ndarray, " L"]


def pack(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> list[Rows]:
    """Micro-batches that hold every sample once.

    A sample goes to the shortest shape that holds it, and there to the first row with room, longest samples first.

    Args:
        shapes: ascending by length; the last must hold any sample.

    Raises:
        ValueError: a sample begins with an action, has none, or fits no shape.
    """
    by_shape: dict[RowShape, list[list[Sample]]] = {shape: [] for shape in shapes}
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i))
    for index in order:
        sample = samples[index]
        length, actions = len(sample.token_ids), int(sample.is_action.sum())
        if not actions or sample.is_action[0]:
            raise ValueError(
                f"sample {index}: expected a prompt and then at least one action token, got {actions} of {length} "
                "tokens; a trajectory without actions teaches nothing and must not reach the learner"
            )
        shape = next((s for s in shapes if length <= s.length and actions <= s.actions), None)
        if shape is None:
            raise ValueError(
                f"sample {index} has {length} tokens and {actions} actions, more than the largest row {shapes[-1]}; "
                "lengthen the rows or lower the limits of an episode"
            )
        rows = by_shape[shape]
        for row in rows:
            if (
                sum(len(s.token_ids) for s in row) + length <= shape.length
                and sum(int(s.is_action.sum()) for s in row) + actions <= shape.actions
            ):
                row.append(sample)
                break
        else:
            rows.append([sample])
    return [
        fill(rows[start : start + shape.rows], shape)
        for shape, rows in by_shape.items()
        for start in range(0, len(rows), shape.rows)
    ]


def fill(rows: Sequence[Sequence[Sample]], shape: RowShape) -> Rows:
    """A micro-batch with the samples of `rows[b]` one after the other in row b; rows that are missing are padding."""
    tokens = np.zeros((5, shape.rows, shape.length), np.int32)
    token_ids, positions, segment_ids = tokens[0], tokens[1], tokens[2]
    target = np.ones((shape.rows, shape.actions), np.int32)
    is_action = np.zeros((shape.rows, shape.actions), bool)
    behavior_logprob = np.zeros((shape.rows, shape.actions), np.float32)
    advantage = np.zeros((shape.rows, shape.actions), np.float32)
    for b, row in enumerate(rows):
        at, action_at = 0, 0
        for segment, sample in enumerate(row, start=1):
            length = len(sample.token_ids)
            where = np.flatnonzero(sample.is_action)
            actions = slice(action_at, action_at + len(where))
            token_ids[b, at : at + length] = sample.token_ids
            positions[b, at : at + length] = np.arange(length)
            segment_ids[b, at : at + length] = segment
            target[b, actions] = at + where
            is_action[b, actions] = True
            behavior_logprob[b, actions] = sample.behavior_logprob[where]
            advantage[b, actions] = sample.advantage[where]
            at, action_at = at + length, action_at + len(where)
    # Host arrays where `Rows` says device arrays: jit takes both.
    arrays: tuple[Any, ...] = (token_ids, positions, segment_ids, target, is_action, behavior_logprob, advantage)
    return Rows(*arrays)
