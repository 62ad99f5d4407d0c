"""The metrics of a run: an append-only JSONL file that survives kills, and an optional mirror of it to wandb."""

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


class Mirror(Protocol):
    """Somewhere else that rows are sent to as they are written; the file stays the truth."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Sends one row."""

    def close(self) -> None:
        """Sends what is left."""


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DamagedLog(ValueError):
    """A metrics file holds what no run wrote, nor a kill left; the message names the place."""


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The complete rows of a metrics file, in order; a last line that was cut short by a kill is left out.

    Raises:
        DamagedLog: a line other than the last is not a row, which no kill can cause.
    """
    rows: list[dict[str, Any]] = []
    *lines, torn = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row["step"], int) or not isinstance(row["kind"], str):
                raise ValueError("it is no row")
        except (ValueError, KeyError) as error:
            raise DamagedLog(
                f"{path}:{number}: expected a row with step and kind, got {line[:60]!r}; restore the line, or delete it"
            ) from error
        rows.append(row)
    return rows


def _plain(value: Any) -> int | float | bool | str:
    """A metric as a Python value; arrays of one element, of numpy or JAX, count as scalars."""
    if isinstance(value, (bool, int, float, str)):
        return value
    scalar = np.asarray(value)
    if scalar.size != 1 or scalar.dtype.kind not in "biuf" and scalar.dtype.name != "bfloat16":
        raise ValueError(f"expected a number, a boolean or a string, got {value!r}; reduce it to one")
    if scalar.dtype.name == "bfloat16":
        return float(scalar.astype(np.float32).item())
    plain: int | float | bool = scalar.item()
    return plain


class MetricsLog:
    """The rows of `metrics.jsonl`: one a step and kind, each on disk when `append` returns.

    A row is `{"kind": "train", "step": 7, "reward": 0.4, ...}`. A metric that isn't finite is stored as null, since
    JSON has no NaN, and is named in the row's `nonfinite`.

    A run that goes on from the checkpoint of step s opens the file with `resume_step=s`. Rows of later steps, written
    between that checkpoint and the crash, are cut, so that each step has one row however often a run is killed:

        written before the crash   1 2 3 4 5      (checkpoint at 3)
        after opening at 3         1 2 3
        at the end                 1 2 3 4 5 6 7

    Rows *of* step s stay; a validation that follows its checkpoint asks `has` whether it was done already.

    Args:
        path: the file; created with its directory if it isn't there.
        resume_step: the last step that counts; None for a new run, of which no row may exist yet.
        mirror: receives every row after it is on disk.

    Raises:
        ValueError: there are rows although `resume_step` is None, or the file holds something other than rows.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None, mirror: Mirror | None = None):
        self._path = Path(path)
        self._mirror = mirror
        self._nonfinite = 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_rows(self._path) if self._path.exists() else []
        if resume_step is None and rows:
            raise ValueError(
                f"{self._path}: expected no rows at the start of a run, got {len(rows)}; "
                "resume from a checkpoint, or use another directory"
            )
        kept = [row for row in rows if resume_step is not None and row["step"] <= resume_step]
        self._written = {(row["kind"], row["step"]) for row in kept}
        if len(self._written) != len(kept):
            raise DamagedLog(f"{self._path}: expected one row a step and kind, got several; delete the duplicates")
        self._replace(kept)
        self._file = self._path.open("a", encoding="utf-8")

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        """Makes the file hold exactly `rows`, at one stroke."""
        draft = self._path.with_name(self._path.name + ".tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)
        _sync_directory(self._path.parent)

    @property
    def nonfinite(self) -> int:
        """Metrics that weren't finite, since this object was made."""
        return self._nonfinite

    def has(self, step: int, kind: str = "train") -> bool:
        """Whether the row of this step and kind is written."""
        return (kind, step) in self._written

    def append(self, step: int, metrics: Mapping[str, Any], kind: str = "train") -> None:
        """Writes one row and waits until it is on disk.

        Args:
            step: the training step that the metrics are of; 0 for what precedes the first.
            metrics: a number, boolean or string by name; scalar arrays are converted.
            kind: `train`, or what else the row is about, such as `validation`.

        Raises:
            ValueError: the row exists already, or a metric has a reserved name or isn't a scalar.
        """
        if self.has(step, kind):
            raise ValueError(
                f"{self._path}: expected one {kind} row of step {step}, got a second; resume from a checkpoint"
            )
        row: dict[str, Any] = {"kind": kind, "step": step}
        nonfinite = []
        for name, value in metrics.items():
            if name in ("kind", "step", "nonfinite"):
                raise ValueError(f"{name}: expected another name for a metric, since rows use this one; rename it")
            try:
                plain = _plain(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if isinstance(plain, float) and not math.isfinite(plain):
                nonfinite.append(name)
                row[name] = None
            else:
                row[name] = plain
        if nonfinite:
            row["nonfinite"] = nonfinite
            self._nonfinite += len(nonfinite)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._written.add((kind, step))
        if self._mirror is not None:
            self._mirror.log(row)

    def close(self) -> None:
        """Closes the file and the mirror."""
        self._file.close()
        if self._mirror is not None:
            self._mirror.close()


class WandbMirror:
    """Sends rows to Weights & Biases, which is imported only when this is made.

    The run's id is kept in `wandb_run_id` of the run directory, so that a resumed run goes on under the same id. wandb
    can neither take rows back nor merge offline runs by itself: after a crash it may show the rows since the last
    checkpoint twice, or, offline, in a second folder of the same id for `wandb sync`. The JSONL file has each once.

    Args:
        directory: the run directory.
        mode: whether wandb uses the network.
        project: where wandb files the run.
        name: what wandb calls the run.
        config: the run's configuration, as `to_json` gives it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        mode: Literal["offline", "online"],
        project: str,
        name: str,
        config: Mapping[str, Any],
    ):
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        import wandb  # here, not at the top: the import takes a second, and most runs never need it

        self._run = wandb.init(
            dir=str(directory),
            id=_run_id(directory / "wandb_run_id"),
            # Offline there is nothing to ask whether the run exists; wandb warns of `resume` and ignores it.
            resume="allow" if mode == "online" else None,
            mode=mode,
            project=project,
            name=name,
            config=dict(config),
            settings=wandb.Settings(silent=True),
        )
        # The step is a metric like others: wandb drops rows whose own step doesn't grow, as after a crash.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any]) -> None:
        """Sends one row, its metrics prefixed with its kind."""
        metrics = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step")}
        self._run.log({"step": row["step"], **metrics})

    def close(self) -> None:
        """Ends the wandb run, sending what is left."""
        self._run.finish()


def _run_id(path: Path) -> str:
    if not path.exists():
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        os.replace(draft, path)
    return path.read_text(encoding="utf-8").strip()
