"""Configurations as dotted names: listing, overriding, comparing, and storing them as JSON."""

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from searchrl_jax.config.schema import Experiment


class Setting(NamedTuple):
    """One leaf of a configuration's schema."""

    annotation: Any
    metadata: Mapping[str, Any]


def settings(schema: type = Experiment, prefix: str = "") -> dict[str, Setting]:
    """Type and range of every leaf field by dotted name, in the order of declaration."""
    hints = typing.get_type_hints(schema)
    found = {}
    for field in dataclasses.fields(schema):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            found.update(settings(typing.cast(type, annotation), f"{prefix}{field.name}."))
        else:
            found[prefix + field.name] = Setting(annotation, field.metadata)
    return found


def suggestion(name: str, known: list[str]) -> str:
    """A closing clause for a message about an unknown name: the nearest known ones, or where to look."""
    # A last part that matches exactly is the likeliest slip: `--temperature` for `--sampling.temperature`.
    same_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same_leaf or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not near:
        return "see --help for the names"
    return "did you mean " + " or ".join(near) + "?"


def with_overrides(config: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """A copy of `config` with the fields of the given dotted names replaced, all at once.

    Rules between fields are checked on the result only, so that fields that depend on each other can change together.

    Raises:
        ValueError: a name is unknown (the message suggests one), or the result breaks a field's type, range or rule.
    """
    known = settings()
    for name in overrides:
        if name not in known:
            raise ValueError(f"{name}: expected the name of a setting; {suggestion(name, list(known))}")
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        group, _, leaf = name.rpartition(".")
        if group:
            nested.setdefault(group, {})[leaf] = value
        else:
            nested[leaf] = value
    changes = {
        name: dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in nested.items()
    }
    return dataclasses.replace(config, **changes)


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def flatten(config: Experiment) -> dict[str, Any]:
    """Every leaf's value by dotted name."""
    return dict(_leaves(config))


def to_json(config: Experiment) -> dict[str, Any]:
    """The configuration as plain nested dictionaries that `json` writes exactly; `from_json` is the inverse."""
    nested = dataclasses.asdict(config)
    plain: dict[str, Any] = json.loads(json.dumps(nested, allow_nan=False))
    return plain


def from_json(stored: Mapping[str, Any]) -> Experiment:
    """The configuration that `to_json` wrote.

    Raises:
        ValueError: a field is unknown or missing, or a value doesn't fit: the file was written by another version or
            edited by hand.
    """
    known = settings()
    flat: dict[str, Any] = {}
    for name, value in stored.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{leaf}": item for leaf, item in value.items()})
        else:
            flat[name] = value
    unknown, missing = sorted(flat.keys() - known.keys()), sorted(known.keys() - flat.keys())
    if unknown or missing:
        raise ValueError(
            f"stored configuration: unknown fields {unknown}, missing fields {missing}; "
            "use the version of the package that wrote it"
        )
    values: dict[str, Any] = {
        name: tuple(value) if typing.get_origin(known[name].annotation) is tuple else value
        for name, value in flat.items()
    }
    return with_overrides(Experiment(exp=values["exp"], scale=values["scale"]), values)


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], ignore: tuple[str, ...] = ()
) -> list[tuple[str, Any, Any]]:
    """Fields in which two stored configurations differ: (dotted name, value in the first, value in the second).

    Works on what `to_json` returned, so that configurations of different versions can be compared; a field that one of
    them lacks has the value None there.

    Args:
        ignore: dotted names of fields, or of whole groups, that may differ.
    """
    found = []
    for name in [*first, *(name for name in second if name not in first)]:
        if name in ignore:
            continue
        one, other = first.get(name), second.get(name)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            inner = tuple(item.partition(".")[2] for item in ignore if item.startswith(f"{name}."))
            group_one, group_other = (value if isinstance(value, Mapping) else {} for value in (one, other))
            nested = differences(group_one, group_other, inner)
            found += [(f"{name}.{leaf}", left, right) for leaf, left, right in nested]
        elif one != other:
            found.append((name, one, other))
    return found


def changes(
    stored: Mapping[str, Any], current: Mapping[str, Any], ignore: tuple[str, ...] = ()
) -> list[tuple[str, Any, Any]]:
    """`differences`, without the settings that came after `stored` was written and stand at their default: a new
    setting's default is what was done before there was one."""
    defaults = to_json(Experiment(exp="", scale=""))

    def is_new(name: str, before: Any, now: Any) -> bool:
        group, _, leaf = name.partition(".")
        known = leaf and leaf not in stored.get(group, {}) and leaf in defaults.get(group, {})
        return bool(known) and before is None and now == defaults[group][leaf]

    return [each for each in differences(stored, current, ignore) if not is_new(*each)]
