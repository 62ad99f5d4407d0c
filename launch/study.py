"""Prints finished runs side by side, as Markdown: gains over the base, over BM25, and over the first run.

python launch/study.py runs/seed0 runs/seed1 [--json]

A run is called by its settings that the others don't share.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 done, 2 called wrongly."""
    options = argparse.ArgumentParser(prog="launch/study.py", description=__doc__.split("\n", 1)[0])
    options.add_argument("workdir", nargs="+", type=Path, help="directory of a finished run")
    options.add_argument("--json", action="store_true", help="print the summaries, by the runs' names, instead")
    chosen = options.parse_args(argv)

    from searchrl_jax.evaluation.study import labels, read_run, tables

    try:
        configs, summaries = zip(*map(read_run, chosen.workdir), strict=True)
        runs = list(zip(labels(configs), summaries, strict=True))
        print(json.dumps(dict(runs)) if chosen.json else tables(runs, chosen.workdir))
    except ValueError as error:
        print(f"launch/study.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
