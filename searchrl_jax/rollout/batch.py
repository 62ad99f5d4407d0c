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
    trajectory_tokens: Int[Array, "B A"]
    proximal_logprob: Float[Array, "B A"]
    reference_logprob: Float[Array, "B A"]
    value: Float[Array, "B A"]
    value_target: Float[Array, "B A"]


@dataclass(frozen=True)
class RowShape:
    """Rows of `length` tokens with at most `actions` action tokens, `rows` to a micro-batch."""

    rows: int
    length: int
    actions: int


@dataclass(frozen=True)
class Sample:
    """What the learner takes from one trajectory, or from the part of it that one row can hold.

    Numbers per token are read at action tokens only.

    Attributes:
        trajectory_tokens: action tokens of the whole trajectory; None if the sample is the whole.
        proximal_logprob: of the policy that the ratio is taken to; None for the behaviour policy.
        reference_logprob: of the reference policy; None where no loss reads it.
        value: estimate of the value model before each token, at the start of the step; None without one.
        value_target: what it should have been.
    """

    token_ids: Int[np.ndarray, " L"]
    is_action: Bool[np.ndarray, " L"]
    behavior_logprob: Float[np.ndarray, " L"]
    advantage: Float[np.ndarray, " L"]
    trajectory_tokens: int | None = None
    proximal_logprob: Float[np.ndarray, " L"] | None = None
    reference_logprob: Float[np.ndarray, " L"] | None = None
    value: Float[np.ndarray, " L"] | None = None
    value_target: Float[np.ndarray, " L"] | None = None


@dataclass(frozen=True)
class Layout:
    """Which samples, by index, stand one after the other in each row of a micro-batch."""

    shape: RowShape
    rows: tuple[tuple[int, ...], ...]


def pack(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> list[Rows]:
    """Micro-batches that hold every sample once, laid out as `arrange` says.

    Raises:
        ValueError: as `arrange`.
    """
    return [
        fill([[samples[i] for i in row] for row in layout.rows], layout.shape) for layout in arrange(samples, shapes)
    ]


def arrange(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> list[Layout]:
    """Micro-batches that hold every sample once.

    A sample goes to the shortest shape that holds it, and there to the first row with room, longest samples first.

    Args:
        shapes: ascending by length; the last must hold any sample.

    Raises:
        ValueError: a sample begins with an action, has none, or fits no shape.
    """
    by_shape: dict[RowShape, list[list[int]]] = {shape: [] for shape in shapes}
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
                sum(len(samples[i].token_ids) for i in row) + length <= shape.length
                and sum(int(samples[i].is_action.sum()) for i in row) + actions <= shape.actions
            ):
                row.append(index)
                break
        else:
            rows.append([index])
    return [
        Layout(shape, tuple(tuple(row) for row in rows[start : start + shape.rows]))
        for shape, rows in by_shape.items()
        for start in range(0, len(rows), shape.rows)
    ]


def unpack(
    samples: Sequence[Sample], layouts: Sequence[Layout], found: Sequence[Float[np.ndarray, "B A"]]
) -> list[Float[np.ndarray, " n"]]:
    """What was computed for the action tokens of packed rows, by sample: the inverse of `pack` on such an array.

    Args:
        found: one array for each layout.
    """
    parts: dict[int, np.ndarray] = {}
    for layout, table in zip(layouts, found, strict=True):
        for values, row in zip(table, layout.rows, strict=False):  # rows that are missing are padding
            at = 0
            for index in row:
                count = int(samples[index].is_action.sum())
                parts[index] = values[at : at + count]
                at += count
    return [parts[index] for index in range(len(samples))]


def fill(rows: Sequence[Sequence[Sample]], shape: RowShape) -> Rows:
    """A micro-batch with the samples of `rows[b]` one after the other in row b; rows that are missing are padding."""
    tokens = np.zeros((3, shape.rows, shape.length), np.int32)
    token_ids, positions, segment_ids = tokens
    target = np.ones((shape.rows, shape.actions), np.int32)
    is_action = np.zeros((shape.rows, shape.actions), bool)
    trajectory_tokens = np.zeros((shape.rows, shape.actions), np.int32)
    numbers = {
        name: np.zeros((shape.rows, shape.actions), np.float32)
        for name in (
            "behavior_logprob",
            "advantage",
            "proximal_logprob",
            "reference_logprob",
            "value",
            "value_target",
        )
    }
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
            whole = sample.trajectory_tokens
            trajectory_tokens[b, actions] = len(where) if whole is None else whole
            given = {
                "behavior_logprob": sample.behavior_logprob,
                "advantage": sample.advantage,
                "proximal_logprob": (
                    sample.behavior_logprob if sample.proximal_logprob is None else sample.proximal_logprob
                ),
                "reference_logprob": sample.reference_logprob,
                "value": sample.value,
                "value_target": sample.value_target,
            }
            for name, per_token in given.items():
                if per_token is not None:
                    numbers[name][b, actions] = per_token[where]
            at, action_at = at + length, action_at + len(where)
    arrays: dict[str, Any] = {
        "token_ids": token_ids,
        "positions": positions,
        "segment_ids": segment_ids,
        "target": target,
        "is_action": is_action,
        "trajectory_tokens": trajectory_tokens,
        **numbers,
    }
    # Host arrays where `Rows` says device arrays: jit takes both.
    return Rows(**arrays)
