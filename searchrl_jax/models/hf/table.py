"""Names and layouts of a checkpoint's tensors beside ours, one entry for each of our arrays, read both ways.

    Entry("model.layers.{}.self_attn.q_proj.weight", "layers/q", LINEAR)

says that row i of our stacked `layers/q` is that tensor of layer i, transposed. What an entry needs of shapes it takes
from the decoder's own parameters, so that a table states nothing twice.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from searchrl_jax.models.hf.stored import StoredCheckpoint


@dataclass(frozen=True)
class Layout:
    """How an array (of one layer, if layers are stacked) is stored. Both ways only move elements.

    Args:
        theirs: stored form of our array; of arrays and of tracers.
        ours: our array, of a stored form and our shape.
    """

    theirs: Callable[[Any], Any]
    ours: Callable[[Any, tuple[int, ...]], Any]


SAME = Layout(lambda x: x, lambda x, shape: x)
# [N, H] is stored as [N * H].
FLAT = Layout(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))
# [in, *out] is stored as [out, in], as torch's linear layers have it.
LINEAR = Layout(lambda x: x.reshape(x.shape[0], -1).T, lambda x, shape: x.T.reshape(shape))


@dataclass(frozen=True)
class Entry:
    """One of our arrays and the tensors that it is stored as.

    Args:
        theirs: the tensor's name, with a `{}` for the layer where layers are stacked, and one for the expert.
        ours: the array's path; it has a leading dimension for each `{}`.
        layout: how an array without those dimensions is stored.
        layers: the number that the checkpoint gives to each of the stacked layers; counted from 0 where None.
        may_be_wide: stored in float32 in checkpoints that are narrower otherwise, since it's small and matters.
    """

    theirs: str
    ours: str
    layout: Layout = SAME
    layers: Sequence[int] | None = None
    may_be_wide: bool = False


@dataclass(frozen=True)
class Row:
    """One tensor of the checkpoint: element `index` of our array at `path`, stored with this shape."""

    name: str
    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    layout: Layout
    may_be_wide: bool


def rows_of(entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[Row]:
    """A row for each tensor that a checkpoint of these parameters has.

    Args:
        shapes: of our arrays, by path.

    Raises:
        ValueError: an array has no entry, so that the family can't store it.
    """
    by_path = {entry.ours: entry for entry in entries}
    if without := sorted(shapes.keys() - by_path.keys()):
        raise ValueError(f"expected parameters that the family has names for, got {', '.join(without)} as well")
    return [row for path, shape in shapes.items() for row in _rows(by_path[path], shape)]


def _rows(entry: Entry, shape: tuple[int, ...]) -> Iterator[Row]:
    stacked = entry.theirs.count("{}")
    piece = jax.ShapeDtypeStruct(shape[stacked:], np.float32)
    stored = jax.eval_shape(entry.layout.theirs, piece).shape
    for index in itertools.product(*map(range, shape[:stacked])):
        numbers = index if entry.layers is None else (entry.layers[index[0]], *index[1:])
        yield Row(entry.theirs.format(*numbers), entry.ours, index, stored, entry.layout, entry.may_be_wide)


def check(stored: StoredCheckpoint, rows: Sequence[Row], carried: tuple[str, ...]) -> None:
    """Nothing, if the checkpoint has just these tensors.

    Args:
        carried: beginnings of the names of tensors that aren't ours to read.

    Raises:
        ValueError: tensors are missing, extra, misshaped or mistyped. The message lists all of them.
    """
    tensors, wanted = stored.tensors, {row.name: row for row in rows}
    dtype = stored.dtype
    faults = [f"missing {name}" for name in wanted if name not in tensors]
    faults += [f"extra {name}" for name in tensors if name not in wanted and not name.startswith(carried)]
    for name, row in wanted.items():
        if name not in tensors:
            continue
        found = tensors[name]
        if found.shape != row.shape:
            faults.append(f"misshaped {name}: expected {list(row.shape)}, got {list(found.shape)}")
        dtype = dtype or found.dtype
        if found.dtype != dtype and not (row.may_be_wide and found.dtype == np.float32):
            faults.append(f"mistyped {name}: expected {dtype}, got {found.dtype}")
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(
            f"{stored.where}: expected the tensors that its config.json describes, found {len(faults)} faults; "
            f"correct the configuration or the checkpoint:\n  {listed}"
        )
