"""Trains an experiment on whatever JAX finds here: a TPU or GPU, or the CPU.

python launch/tpu.py --exp=mtrl_search [--scale=local] [--seed=1] [--rl.loss_fn=cispo] [--workdir=runs/mine] [--json]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """The exit status: 0 done or cleanly interrupted, 1 failed, 2 called wrongly."""
    from searchrl_jax.config.cli import experiments, parse

    load, names = experiments(ROOT / "experiments", choose_scale)
    flags = {"json": "print the summary of final.json as the last line"}
    invocation = parse(argv, load, names, prog="launch/tpu.py", flags=flags)

    from searchrl_jax.train.interrupt import Interrupted
    from searchrl_jax.train.loop import SetupError, run

    try:
        summary = run(invocation.experiment)
    except Interrupted as interrupted:
        print(interrupted)
        return 0
    except SetupError as error:
        print(f"launch/tpu.py: error: {error}", file=sys.stderr)
        return 2
    if "json" in invocation.flags:
        print(json.dumps(summary))
    return 0


def choose_scale() -> str:
    """The scale for this machine; says which and why."""
    import jax

    backend = jax.default_backend()
    print(f"scale: local, chosen for {len(jax.devices())} {backend} device(s); --scale names another", flush=True)
    return "local"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("stopped at once; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
