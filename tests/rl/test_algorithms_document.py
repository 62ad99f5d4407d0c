"""The tables of docs/algorithms.md name what there is, with the defaults that it has."""

import re
from pathlib import Path

import numpy as np
import pytest

from searchrl_jax.rl.advantages import ADVANTAGES
from searchrl_jax.rl.aggregate import AGGREGATIONS
from searchrl_jax.rl.losses import DEFAULT_BOUNDS, LOSSES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def table(first_header: str) -> dict[str, list[str]]:
    """The cells of each row by its first, of the table with that first header."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name.strip("`")] = cells
    return found


def test_the_tables_have_the_names_of_the_registries():
    assert list(table("method")) == [*ADVANTAGES, "gae"]
    assert list(table("loss")) == list(LOSSES)
    assert tuple(table("`rl.loss_aggregation`")) == AGGREGATIONS


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_stated_normalisation_is_the_default(name):
    rewards, tokens = np.array([[1.0, 0.0, 0.5, 0.25]]), np.array([[3, 5, 7, 2]])
    said = {"yes": True, "no": False}[table("method")[name][1]]
    for normalize in (said, not said):
        other = ADVANTAGES[name](rewards, action_tokens=tokens, normalize=normalize)
        same = np.array_equal(ADVANTAGES[name](rewards, action_tokens=tokens), other)
        assert same == (normalize == said)


def test_the_stated_bounds_are_the_defaults():
    for name, cells in table("loss").items():
        low, high = DEFAULT_BOUNDS[name]
        assert cells[1] == ("none" if np.isinf(high) else f"{low:g}, {high:g}")


def test_every_row_is_filled_and_names_a_source():
    for rows in (table("method"), table("loss")):
        for name, cells in rows.items():
            assert len(cells) == 4 and all(cells), name
            assert re.search(r"arXiv:\d{4}\.\d{4,5}|REINFORCE|published", cells[2]), name
