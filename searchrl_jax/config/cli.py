"""The command line of an experiment: `--exp` picks it, `--scale` sizes it, every other option overrides a setting."""

import contextlib
import difflib
import importlib.util
import io
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import tyro

from searchrl_jax.config.checks import describe, element_type, without_none
from searchrl_jax.config.overlays import Setting, settings, suggestion, with_overrides
from searchrl_jax.config.schema import Experiment

# What an experiment's file offers: its settings at a scale. `auto` lets the file choose.
Experimenter = Callable[[str], Experiment]

# Options are written `--rl.loss_fn=cispo`, never as a pair of flags, so that one rule covers every type.
_TYRO = (tyro.conf.FlagConversionOff,)


class UsageError(ValueError):
    """A command line that can't be carried out; its text is one line that says why and what to do."""


@dataclass(frozen=True)
class Invocation:
    """A command line, understood."""

    experiment: Experiment
    flags: frozenset[str]
    """Those of the script's own flags that were given."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Those of the script's own options that were given."""


def experiments(folder: Path, choose_scale: Callable[[], str]) -> tuple[Callable[[str], Experimenter], list[str]]:
    """What loads an experiment's file by its name, and the names in `folder`: `load` and `names` of `parse`.

    Args:
        choose_scale: says what the scale `auto` stands for.
    """

    def load(name: str) -> Experimenter:
        spec = importlib.util.spec_from_file_location(f"experiments.{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return lambda scale: module.config(choose_scale() if scale == "auto" else scale)

    return load, sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def parse(
    argv: Sequence[str],
    load: Callable[[str], Experimenter],
    names: Sequence[str],
    *,
    prog: str,
    flags: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Invocation:
    """What `read` returns; a command line that can't be carried out ends the process instead.

    Raises:
        SystemExit: with code 2 after one line on stderr, or with code 0 after the help text.
    """
    try:
        return read(argv, load, names, prog=prog, flags=flags, own=own)
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read(
    argv: Sequence[str],
    load: Callable[[str], Experimenter],
    names: Sequence[str],
    *,
    prog: str,
    flags: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Invocation:
    """The experiment that a command line asks for.

    Options are `--name=value` or `--name value`, with dashes and underscores alike; a list is `--name 1 2` or
    `--name=1,2`.

    Args:
        argv: the arguments after the program's name.
        load: from an experiment's name to the function that makes its settings at a scale.
        names: the experiments there are.
        prog: how messages and help call the program.
        flags: what each of the script's own flags (`--json`) means; they take no value.
        own: what each of its own options means, which take one.

    Raises:
        UsageError: an option is unknown, given twice, lacks its value, or has one that doesn't fit.
        SystemExit: with code 0, after `--help`.
    """
    flags, own = flags or {}, own or {}
    if any(argument in ("-h", "--help") for argument in argv):
        _print_help(argv, load, names, prog, {**flags, **own})
    given = _options(argv)
    raised = frozenset(name for name in given if name in flags)
    for name in raised:
        if given.pop(name):
            raise UsageError(f"--{name}: expected no value, since it is a flag; write --{name} alone")
    of_script = {}
    for name in [name for name in given if name in own]:
        words = given.pop(name)
        if len(words) != 1 or not words[0]:
            raise UsageError(f"--{name}: expected one value, got {' '.join(words) or 'nothing'}; give {own[name]}")
        of_script[name] = words[0]
    known = settings()
    options = [*known, *flags, *own]
    for name in given:
        if name not in known:
            raise UsageError(f"--{name}: expected the name of an option; {suggestion(name, options)}")
    values = {name: _value(name, known[name], words) for name, words in given.items()}
    if "exp" not in values:
        raise UsageError(f"--exp: expected the name of an experiment, got none; choose from {', '.join(names)}")
    experiment = _experiment(values.pop("exp"), values.pop("scale", "auto"), load, names)
    try:
        return Invocation(with_overrides(experiment, values), raised, of_script)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _experiment(name: str, scale: str, load: Callable[[str], Experimenter], names: Sequence[str]) -> Experiment:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
        raise UsageError(f"--exp: expected the name of an experiment, got {name!r}; {advice}")
    make = load(name)
    try:
        return make(scale)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _options(argv: Sequence[str]) -> dict[str, list[str]]:
    """The words given to each option, by its name with underscores."""
    given: dict[str, list[str]] = {}
    current: list[str] | None = None
    for argument in argv:
        if argument.startswith("--"):
            written, equals, value = argument[2:].partition("=")
            name = written.replace("-", "_")
            if name in given:
                raise UsageError(f"--{name}: expected once, was given twice; keep one of the two")
            given[name] = [value] if equals else []
            current = None if equals else given[name]
        elif current is None:
            raise UsageError(f"{argument}: expected an option such as --seed=1, got a word alone; see --help")
        else:
            current.append(argument)
    return given


def _value(name: str, setting: Setting, words: list[str]) -> Any:
    """The words given to an option as a value of its field's type; the field's range is checked where it is stored."""
    annotation, is_optional = without_none(setting.annotation)
    if is_optional and [word.lower() for word in words] == ["none"]:
        return None
    is_list = typing.get_origin(annotation) is tuple
    if is_list and len(words) == 1:
        words = words[0].split(",")
    element = element_type(annotation)
    if words and (is_list or len(words) == 1):
        if element is str:
            return tuple(words) if is_list else words[0]
        # tyro reads True and False as Python writes them, and nothing else
        readable = [word.title() for word in words] if element is bool else words
        # tyro prints what it refuses, in a box of several lines, even with its console output off
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(annotation, args=readable, config=_TYRO, console_outputs=False)
    got = " ".join(words)
    came = repr(got) if words else "nothing"
    advice = "write --" + name + "=VALUE"
    if typing.get_origin(element) is Literal and (
        near := difflib.get_close_matches(got, [str(choice) for choice in typing.get_args(element)], n=1)
    ):
        advice = f"did you mean {near[0]}?"
    raise UsageError(f"{name}: expected {describe(setting.annotation, setting.metadata)}, got {came}; {advice}")


def _print_help(
    argv: Sequence[str],
    load: Callable[[str], Experimenter],
    names: Sequence[str],
    prog: str,
    flags: Mapping[str, str],
) -> NoReturn:
    """Prints every option by group, with the defaults of the experiment and scale that the command line names."""
    given = _options([argument for argument in argv if argument not in ("-h", "--help")])
    name, scale = (given.get(option, [])[:1] for option in ("exp", "scale"))
    shown = Experiment(exp="NAME", scale="auto")
    if name:
        shown = _experiment(name[0], scale[0] if scale else "auto", load, names)
        shown = replace(shown, exp=name[0])
    lines = [f"Experiments: {', '.join(names)}."]
    lines += [f"--{flag}: {meaning}" for flag, meaning in flags.items()]
    tyro.cli(
        Experiment,
        default=shown,
        args=["--help"],
        prog=prog,
        description="\n\n".join(lines),
        config=_TYRO,
        use_underscores=True,
    )
    raise SystemExit(0)
