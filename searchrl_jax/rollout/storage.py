"""Finished groups on disk, exactly as they were: token arrays and all that a trajectory says."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from searchrl_jax.rollout.trajectory import Trajectory, Turn

_ARRAYS = {
    "token_ids": np.int32,
    "is_action": np.bool_,
    "behavior_logprob": np.float32,
    "policy_version": np.int32,
    "turn": np.int32,
}


def save_groups(path: Path, groups: Mapping[int, Sequence[Trajectory]]) -> None:
    """Writes groups by number, at one stroke: the file is there whole and on disk, or as it was before.

    The arrays of all trajectories stand one after the other, with their lengths; the rest is JSON. No pickle.
    """
    trajectories = [trajectory for group in groups.values() for trajectory in group]
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(each, name) for each in trajectories)])
        for name, dtype in _ARRAYS.items()
    }
    arrays["lengths"] = np.array([len(each.token_ids) for each in trajectories], np.int64)
    text = json.dumps({number: [_rest(each) for each in group] for number, group in groups.items()})
    arrays["rest"] = np.frombuffer(text.encode("ascii"), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_groups(path: Path) -> dict[int, list[Trajectory]]:
    """What `save_groups` wrote."""
    with np.load(path, allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    ends = np.cumsum(stored["lengths"])
    split = {name: np.split(stored[name], ends) for name in _ARRAYS}
    arrays = iter([{name: split[name][i] for name in _ARRAYS} for i in range(len(ends))])
    rest = json.loads(stored["rest"].tobytes())
    return {int(number): [_trajectory(each, next(arrays)) for each in group] for number, group in rest.items()}


def _rest(trajectory: Trajectory) -> dict[str, Any]:
    rest = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory) if f.name not in _ARRAYS}
    return rest | {"turns": [dataclasses.asdict(turn) for turn in trajectory.turns]}


def _trajectory(rest: dict[str, Any], arrays: dict[str, Any]) -> Trajectory:
    # JSON has lists where a trajectory has tuples.
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in rest.items()}
    return Trajectory(**arrays | plain | {"turns": tuple(Turn(**turn) for turn in rest["turns"])})
