"""Checkpoints of a run: arrays and host state of one step, published whole or not at all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from searchrl_jax.config.overlays import changes

# Differing names that a message lists before it only counts the rest.
_LISTED = 8


class CheckpointMismatch(ValueError):
    """The checkpoint and the run that asks for it are not of one kind; the message says where they differ."""


class Restored(NamedTuple):
    """What a checkpoint held."""

    arrays: Any
    host_state: dict[str, Any]


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, `params/layers/0/w`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("checkpoint: expected leaves of distinct paths, got two of one path; rename a dictionary key")
    return named


def _shapes(named: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[dtype, shape] of each leaf, as the checkpoint records it."""
    found = {}
    for name, leaf in named.items():
        if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise ValueError(
                f"checkpoint: expected arrays, got {type(leaf).__name__} at {name!r}; plain values belong in host_state"
            )
        if 0 in leaf.shape:  # Orbax can't store them, and says so only after it has begun to write
            raise ValueError(f"checkpoint: expected arrays with elements, got shape {leaf.shape} at {name!r}; drop it")
        found[name] = [str(leaf.dtype), list(leaf.shape)]
    return found


def _target(leaf: Any) -> Any:
    """What Orbax is asked to restore in place of `leaf`: its shape, dtype and the devices it lies on."""
    if isinstance(leaf, np.ndarray):
        return leaf
    # Without a sharding Orbax would take the one of the process that saved, whose devices may not exist here.
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _clauses(found: Sequence[str]) -> str:
    listed = "; ".join(found[:_LISTED])
    return listed if len(found) <= _LISTED else f"{listed}; and {len(found) - _LISTED} more"


class Checkpointer:
    """The checkpoints in a directory, one per step.

    A checkpoint is written under a temporary name and renamed when all of it is on disk, so a process killed at any
    moment leaves the earlier checkpoints as they were; `save` returns after the rename. Arrays may be restored onto any
    number of devices. Nothing is stored with pickle.

    Args:
        directory: where the checkpoints lie; created if it isn't there.
        config: the run's configuration, as `to_json` gives it; it is stored with each checkpoint.
        keep: newest checkpoints that are kept; older ones are deleted after a newer one is complete.
        may_differ: fields or groups of the configuration that may change between a run and its continuation.

    Raises:
        CheckpointMismatch: the directory's newest checkpoint is of another configuration.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: Mapping[str, Any],
        keep: int = 2,
        may_differ: tuple[str, ...] = (),
    ):
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint to keep, got {keep}; keep the newest at least")
        self._directory = Path(directory).absolute()
        self._config = _plain(config, "config")
        self._may_differ = may_differ
        # Synchronous: with asynchronous writing the manager's latest step is a promise until the write ends, and a
        # tree of 10 MB takes 0.07 s.
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False),
        )
        newest = self.latest()
        if newest is not None:
            self._read_host(newest)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, host_state: Mapping[str, Any]) -> None:
        """Writes a checkpoint; when this returns it is complete and the newest.

        Args:
            step: its number, above that of every other checkpoint in the directory.
            arrays: a pytree of JAX arrays (typed random keys among them) and numpy arrays.
            host_state: everything else, as JSON writes it exactly: lists rather than tuples, string keys, no NaN.

        Raises:
            ValueError: `step` isn't newer than the newest, a leaf isn't an array with elements, or `host_state` isn't
                JSON. Nothing has been written then.
        """
        newest = self.latest()
        if newest is not None and step <= newest:
            raise ValueError(
                f"checkpoint: expected a step above {newest}, the newest in {self._directory}, got {step}; "
                "restore the newest, or use another directory"
            )
        named = _named_leaves(arrays)
        host = {
            "config": self._config,
            "host_state": _plain(host_state, "host_state"),
            "shapes": _shapes(named),
        }
        written = self._manager.save(
            step,
            args=ocp.args.Composite(arrays=ocp.args.StandardSave(named), host=ocp.args.JsonSave(host)),
        )
        if not written:  # Orbax declines without an error, for instance while a preemption is under way
            raise RuntimeError(f"checkpoint: step {step} was not written to {self._directory}")

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """The arrays and the host state of a checkpoint.

        Args:
            like: a pytree of the structure, shapes and dtypes that were saved: arrays, or `jax.ShapeDtypeStruct`. Its
                shardings say where the restored arrays go; a `ShapeDtypeStruct` without one means the first local
                device. A numpy array is restored as one.
            step: which checkpoint; the newest if None.

        Raises:
            CheckpointMismatch: structure, a shape or a dtype differs from `like`, or the configuration from this run's.
            ValueError: there is no such checkpoint.
        """
        steps = sorted(self._manager.all_steps())
        chosen = self.latest() if step is None else step
        if chosen is None or chosen not in steps:
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise ValueError(f"checkpoint: expected {wanted} in {self._directory}, found steps {steps}; save one first")
        host = self._read_host(chosen)
        named = _named_leaves(like)
        self._check_shapes(chosen, host["shapes"], _shapes(named))
        targets = {name: _target(leaf) for name, leaf in named.items()}
        arrays = self._read(chosen, "arrays", ocp.args.StandardRestore(targets))
        # In the order of `named`, which is the tree's: Orbax returns dictionaries in the order of their keys.
        tree = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named])
        return Restored(tree, host["host_state"])

    def close(self) -> None:
        """Releases the manager's threads."""
        self._manager.close()

    def _read(self, step: int, part: str, how: Any) -> Any:
        """A part of a checkpoint.

        Raises:
            CheckpointMismatch: its files are damaged, which no kill can cause.
        """
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{part: how}))[part]
        except Exception as error:  # Orbax and TensorStore raise many kinds
            why = " ".join(str(error).split())[:200]
            raise CheckpointMismatch(
                f"checkpoint of step {step} in {self._directory}: expected to read its {part}, but "
                f"{type(error).__name__}: {why}; restore its files, or delete {self._directory / str(step)} to begin "
                "from what is left"
            ) from error

    def _read_host(self, step: int) -> dict[str, Any]:
        """The checkpoint's JSON part, once its configuration is known to be this run's."""
        host: dict[str, Any] = self._read(step, "host", ocp.args.JsonRestore())
        found = changes(host["config"], self._config, self._may_differ)
        if found:
            clauses = [f"{name} was {stored!r}, is {current!r}" for name, stored, current in found]
            raise CheckpointMismatch(
                f"checkpoint of step {step} in {self._directory}: expected this run's configuration, but "
                f"{_clauses(clauses)}; give the old values back, or use another directory"
            )
        return host

    def _check_shapes(self, step: int, stored: Mapping[str, list[Any]], wanted: Mapping[str, list[Any]]) -> None:
        # Orbax casts to the wanted dtype without a word, so the comparison is made here.
        found = [f"{name} is missing" for name in wanted if name not in stored]
        found += [f"{name} was not asked for" for name in stored if name not in wanted]
        for name, (dtype, shape) in wanted.items():
            if name in stored and stored[name] != [dtype, shape]:
                stored_dtype, stored_shape = stored[name]
                found.append(f"{name} is {stored_dtype}{stored_shape}, wanted {dtype}{shape}")
        if found:
            raise CheckpointMismatch(
                f"checkpoint of step {step} in {self._directory}: expected the arrays of this run, but "
                f"{_clauses(found)}; build the state as the run that saved it did"
            )


def _plain(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`value`, proved to survive JSON unchanged."""
    advice = "use dictionaries with string keys, lists, strings, finite numbers, booleans and None"
    try:
        plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint: expected {name} to be JSON, but {error}; {advice}") from error
    if plain != value:
        raise ValueError(f"checkpoint: expected {name} to survive JSON, but it reads back as {plain}; {advice}")
    return plain
