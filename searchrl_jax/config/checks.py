"""How a configuration field declares what it accepts, and the check that holds it to that."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

_DESCRIPTIONS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def within(low: float, high: float = math.inf, *, above: bool = False) -> Mapping[str, Any]:
    """Metadata of a numeric field (or of every element of a tuple field) that lies in [low, high].

    Args:
        low: least value; with `above` the least value that is *not* allowed, as in (low, high].
        high: greatest value; infinity itself is never accepted, since a configuration is stored as JSON.
        above: whether `low` is excluded.
    """
    return {"range": (low, high, above)}


def element_type(annotation: Any) -> Any:
    """T of a field annotated `tuple[T, ...]`; the annotation itself for any other field."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is tuple else annotation


def without_none(annotation: Any) -> tuple[Any, bool]:
    """T and true for a field annotated `T | None`; the annotation itself and false for any other."""
    arguments = typing.get_args(annotation)
    if type(None) not in arguments:
        return annotation, False
    return next(argument for argument in arguments if argument is not type(None)), True


def describe(annotation: Any, metadata: Mapping[str, Any]) -> str:
    """What a field accepts, in words: `a number in [0, 1]`, `one of 'ppo', 'cispo'`."""
    annotation, is_optional = without_none(annotation)
    if is_optional:
        return f"{describe(annotation, metadata)}, or none"
    if typing.get_origin(annotation) is tuple:
        return f"a list, each {describe(element_type(annotation), metadata)}"
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(annotation))
    text = _DESCRIPTIONS[annotation]
    if "range" in metadata:
        low, high, above = metadata["range"]
        if math.isinf(high):
            text += f" above {low:g}" if above else f" of at least {low:g}"
        else:
            text += f" in {'(' if above else '['}{low:g}, {high:g}]"
    return text


def accepts(value: Any, annotation: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether `value` has the annotated type (an int passes for a float, a bool for neither) and lies in range; None
    passes where the annotation has it."""
    annotation, is_optional = without_none(annotation)
    if is_optional and value is None:
        return True
    if typing.get_origin(annotation) is tuple:
        element = element_type(annotation)
        return isinstance(value, tuple) and all(accepts(item, element, metadata) for item in value)
    if typing.get_origin(annotation) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(annotation))
    if annotation is bool or isinstance(value, bool):
        return annotation is bool and isinstance(value, bool)
    if not isinstance(value, (int, float) if annotation is float else annotation):
        return False
    if annotation is str:
        return True
    if not math.isfinite(value):
        return False
    if "range" not in metadata:
        return True
    low, high, above = metadata["range"]
    return (low < value if above else low <= value) and value <= high


class Checked:
    """Base of the configuration's dataclasses: a value out of a field's type or range is refused on construction.

    Raises:
        ValueError: `group.field: expected a number in [0, 1], got 1.3; choose a value that fits`.
    """

    group: ClassVar[str] = ""  # the prefix under which the command line and messages name the fields

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value, annotation = getattr(self, field.name), hints[field.name]
            name = self.named(field.name)
            if dataclasses.is_dataclass(annotation):
                if type(value) is not annotation:
                    raise ValueError(f"{name}: expected an instance of {annotation}, got {value!r}; construct one")
                continue
            if not accepts(value, annotation, field.metadata):
                expected = describe(annotation, field.metadata)
                raise ValueError(f"{name}: expected {expected}, got {value!r}; choose a value that fits")
        self.check()

    def named(self, field: str) -> str:
        """The dotted name of a field of this group, as the command line writes it."""
        return f"{self.group}.{field}" if self.group else field

    def check(self) -> None:
        """Refuses combinations of fields that no single range can; a group that has such rules overrides this."""
