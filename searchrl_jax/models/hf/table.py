"""Names and layouts of a checkpoint's tensors beside our arrays, one entry for each, read both ways.

    Entry("model.layers.{}.self_attn.q_proj.weight", "layers/q", layout=LINEAR)

says that element i of our stacked `layers/q` is that tensor of layer i, transposed. What an entry needs of shapes it
takes from the decoder's own parameters, so that a table states nothing twice.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from searchrl_jax.models.config import Layer
from searchrl_jax.models.hf.layout import SAME, Layout
from searchrl_jax.models.hf.stored import FLOATS, StoredCheckpoint

_LAYERS = "layers/"


class Entry:
    """One of our arrays, or several, and the tensors that they are stored as.

    Args:
        theirs: the tensor's name, with a `{}` for the layer where layers are stacked, and one for the expert.
        ours: the arrays' paths, without a layer's place in its period; a leading dimension for each `{}`.
        layout: how arrays without those dimensions are stored.
        kind: of the layers that it's for; None for all.
        may_be_wide: stored in float32 in checkpoints that are narrower otherwise, since it's small and matters.
    """

    def __init__(
        self,
        theirs: str,
        *ours: str,
        layout: Layout = SAME,
        kind: Literal["attention", "delta"] | None = None,
        may_be_wide: bool = False,
    ) -> None:
        self.theirs, self.ours, self.layout = theirs, ours, layout
        self.kind, self.may_be_wide = kind, may_be_wide

    def renamed(self, theirs: str) -> "Entry":
        """The entry with another name of the tensor."""
        return Entry(theirs, *self.ours, layout=self.layout, kind=self.kind, may_be_wide=self.may_be_wide)


@dataclass(frozen=True)
class Row:
    """One tensor of the checkpoint: element `index` of our arrays at `paths`, stored with this name and shape."""

    name: str
    paths: tuple[str, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    layout: Layout
    may_be_wide: bool


def rows_of(entries: Iterable[Entry], shapes: Mapping[str, tuple[int, ...]], pattern: Sequence[Layer]) -> list[Row]:
    """A row for each tensor that a checkpoint of these parameters has.

    Args:
        entries: of which those count whose arrays are there.
        shapes: of our arrays, by path.
        pattern: the layers of one period; where there are several, `layers/q` is `layers/PLACE/q`.

    Raises:
        ValueError: an array has no entry, so that the family can't store it.
    """
    rows: list[Row] = []
    for entry in entries:
        for place, layer in enumerate(pattern):
            own = entry.ours
            if len(pattern) > 1 and own[0].startswith(_LAYERS):
                own = tuple(f"{_LAYERS}{place}/{path.removeprefix(_LAYERS)}" for path in own)
            is_of_kind = entry.kind in (None, layer.kind)
            if is_of_kind and shapes.keys() >= set(own) and (place == 0 or own != entry.ours):
                rows += _rows(entry, own, [shapes[path] for path in own], place, len(pattern))
    if without := sorted(shapes.keys() - {path for row in rows for path in row.paths}):
        raise ValueError(f"expected parameters that the family has names for, got {', '.join(without)} as well")
    return rows


def _rows(
    entry: Entry, paths: tuple[str, ...], shapes: Sequence[tuple[int, ...]], place: int, period: int
) -> Iterator[Row]:
    stacked = entry.theirs.count("{}")
    pieces = [jax.ShapeDtypeStruct(shape[stacked:], np.float32) for shape in shapes]
    stored = jax.eval_shape(entry.layout.theirs, *pieces).shape
    for index in itertools.product(*map(range, shapes[0][:stacked])):
        numbers = (period * index[0] + place, *index[1:]) if index else ()
        yield Row(entry.theirs.format(*numbers), paths, index, stored, entry.layout, entry.may_be_wide)


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
        if dtype is None and str(found.dtype) in FLOATS:
            dtype = found.dtype
        if found.dtype != dtype and not (row.may_be_wide and found.dtype == np.float32):
            faults.append(f"mistyped {name}: expected {dtype or ' or '.join(FLOATS)}, got {found.dtype}")
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(
            f"{stored.where}: expected the tensors that its config.json describes, found {len(faults)} faults; "
            f"correct the configuration or the checkpoint:\n  {listed}"
        )
