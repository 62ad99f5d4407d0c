"""What a run directory was begun with, and stays with."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from searchrl_jax.config.overlays import changes

Difference = tuple[str, Any, Any]


def claim(
    path: Path, wanted: Mapping[str, Any], refusal: Callable[[list[Difference]], str], *, ignore: tuple[str, ...] = ()
) -> None:
    """Writes `wanted` to the JSON file `path`, or checks that the one that is there says the same.

    Args:
        refusal: the error's text, for what differs: (name, value there, value here).
        ignore: names that may differ.

    Raises:
        ValueError: it says something else, or is no JSON object.
    """
    if path.exists():
        try:
            began_with = json.loads(path.read_text())
        except ValueError:
            began_with = None
        if not isinstance(began_with, dict):
            raise ValueError(f"{path}: expected what a run wrote there, got no JSON object; give another --workdir")
        found = changes(began_with, wanted, ignore)
        if found:
            raise ValueError(refusal(found))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(wanted, indent=2) + "\n")
    os.replace(partial, path)
