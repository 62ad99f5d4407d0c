"""Conditions on metadata: which documents a search may return.

    where = {"package": "numpy"}                      equal
    where = {"kind": ["function", "method"]}          any of these
    where = {"year": {"gte": 2019, "lte": 2021}}      within bounds, ends included

All fields must hold. A list in the metadata holds if any of its items does. A document that lacks the field, or has a
value of another type than the condition's, is never admitted. True is not 1; 1 equals 1.0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

Scalar = str | int | float | bool
Where = Mapping[str, Scalar | Sequence[Scalar] | Mapping[str, int | float | str]]

# A value with the name of its type, so that True, 1 and "1" stay apart in a dictionary.
Key = tuple[str, Scalar]

BOUNDS = ("gte", "lte")


class MetadataTable:
    """The metadata of a collection, row by row, with the rows of each value for every field that was asked for."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = tuple(rows)
        self._fields: dict[str, dict[Key, Int[np.ndarray, " n"]]] = {}

    def admitted(self, where: Where | None) -> Bool[np.ndarray, " N"] | None:
        """Which rows satisfy `where`; None where there is no condition.

        Raises:
            ValueError: `where` is malformed. It is checked even when there are no rows.
        """
        if where is None:
            return None
        if not isinstance(where, Mapping):
            raise ValueError(f"where must map metadata fields to conditions, got {type(where).__name__}")
        selectors = [(field, _selector(field, condition)) for field, condition in where.items()]
        if not selectors:
            return None
        is_admitted = np.ones(len(self.rows), bool)
        for field, select in selectors:
            rows_of = self._rows_of(field)
            holds = np.zeros(len(self.rows), bool)
            for key in select(rows_of):
                holds[rows_of[key]] = True
            is_admitted &= holds
        return is_admitted

    def _rows_of(self, field: str) -> dict[Key, Int[np.ndarray, " n"]]:
        # Two threads may both come here first; they build the same dictionary, so either may stay.
        if field not in self._fields:
            rows_of: dict[Key, list[int]] = {}
            for row, metadata in enumerate(self.rows):
                value = metadata.get(field)
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, (str, int, float, bool)):
                        rows_of.setdefault(_key(item), []).append(row)
            self._fields[field] = {key: np.array(rows) for key, rows in rows_of.items()}
        return self._fields[field]


def _selector(field: str, condition: Any) -> Callable[[Mapping[Key, Any]], list[Key]]:
    """The function that picks, from the values of a field, those that satisfy `condition`."""
    if not isinstance(field, str):
        raise ValueError(f"where: a field name must be a string, got {field!r}")
    if isinstance(condition, Mapping):
        return _range_selector(field, condition)
    values = list(condition) if isinstance(condition, (list, tuple)) else [condition]
    for value in values:
        if not isinstance(value, (str, int, float, bool)) or _is_nan(value):
            raise ValueError(
                f"where[{field!r}]: expected a string, number or boolean, a list of these, "
                f'or {{"gte": x, "lte": y}}, got {value!r}'
            )
    wanted = [_key(value) for value in values]
    return lambda rows_of: [key for key in wanted if key in rows_of]


def _range_selector(field: str, bounds: Mapping[str, Any]) -> Callable[[Mapping[Key, Any]], list[Key]]:
    unknown = [name for name in bounds if name not in BOUNDS]
    if unknown or not bounds:
        raise ValueError(f'where[{field!r}]: a range has "gte", "lte" or both, got the names {list(bounds)}')
    for name, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, (str, int, float)) or _is_nan(bound):
            raise ValueError(f"where[{field!r}][{name!r}]: a bound must be a number or a string, got {bound!r}")
    types = {_key(bound)[0] for bound in bounds.values()}
    if len(types) > 1:
        raise ValueError(f"where[{field!r}]: both bounds must be numbers or both strings, got {dict(bounds)}")
    (wanted_type,) = types
    low, high = bounds.get("gte"), bounds.get("lte")

    def is_within(value: Any) -> bool:
        return (low is None or value >= low) and (high is None or value <= high)

    return lambda rows_of: [(kind, value) for kind, value in rows_of if kind == wanted_type and is_within(value)]


def _key(value: Scalar) -> Key:
    if isinstance(value, bool):
        return "boolean", value
    return ("text" if isinstance(value, str) else "number"), value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
