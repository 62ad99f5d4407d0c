import ast
import re
from pathlib import Path

import searchrl_jax.core.dims
from searchrl_jax.core.dims import DIMENSIONS

PACKAGE = Path(searchrl_jax.core.dims.__file__).parents[1]
JAXTYPING = {"Float", "Bool", "Int", "Key", "UInt", "Shaped", "Num", "Integer", "Inexact"}


def shapes_in(source: str) -> list[str]:
    """The shape strings of all jaxtyping annotations in a module."""
    return [
        node.slice.elts[1].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in JAXTYPING
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.slice.elts[1], ast.Constant)
    ]


def test_the_walk_finds_shapes():
    assert sorted(shapes_in('def f(x: Float[Array, "B L"]) -> Bool[Array, " P"] | None: ...')) == [" P", "B L"]


def test_every_capital_letter_in_a_shape_is_in_the_key():
    unknown = {
        f"{path.name}: {name!r} in {shape!r}"
        for path in PACKAGE.rglob("*.py")
        for shape in shapes_in(path.read_text())
        for name in re.findall(r"[A-Za-z_]+", shape)
        if len(name) == 1 and name.isupper() and name not in DIMENSIONS
    }
    assert not unknown


def test_a_letter_has_one_meaning():
    assert all(len(letter) == 1 and letter.isupper() for letter in DIMENSIONS)
    assert len(set(DIMENSIONS.values())) == len(DIMENSIONS)
