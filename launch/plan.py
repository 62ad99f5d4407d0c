"""Compiles an experiment's training and decoding step for a TPU that isn't here, and says what they would need.

python launch/plan.py --exp=mtrl_search --scale=qwen3.6-27b --topology=v5p:4x4x4 [any setting of the experiment]

Needs libtpu (`make libtpu`) and no TPU. Nothing is run and no weights are read: figures are the compiler's
and what its program implies on chips as their maker describes them. Exits with 1 where the plan doesn't fit.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# libtpu asks the environment who it is, and looks for a metadata server where it finds nothing.
ALONE = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is taken that another program could want
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 the plan fits, 1 it doesn't, 2 called wrongly."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    sys.path.append(str(ROOT / ".libtpu"))

    from searchrl_jax.config.cli import experiments, parse
    from searchrl_jax.planning.chips import CHIPS
    from searchrl_jax.planning.plan import choose_mesh, decoder_of, devices_of, make_plan
    from searchrl_jax.planning.report import report, verdict

    load, names = experiments(ROOT / "experiments", lambda: "local")
    own = {"topology": "the slice to plan for, as in v5e:4x4, v6e:8x8 or v5p:4x4x4"}
    invocation = parse(argv, load, names, prog="launch/plan.py", own=own)
    experiment, topology = invocation.experiment, invocation.own.get("topology", "")
    try:
        generation, devices = devices_of(topology)
        decoder = decoder_of(experiment)
        mesh = choose_mesh(experiment, decoder, devices)
        chip = CHIPS[generation]
        shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        print(
            f"{experiment.exp} at scale {experiment.scale} on {len(devices)} chips of {generation}: {shape}", flush=True
        )
        plan = make_plan(experiment, decoder, mesh, lambda text: print(text, flush=True))
    except ValueError as error:
        print(f"launch/plan.py: error: {error}", file=sys.stderr)
        return 2
    fits, words = verdict(plan, chip, experiment)
    print(f"\n{report(plan, chip)}\n{words}")
    return 0 if fits else 1


if __name__ == "__main__":
    # There is nothing to save, and Python would hear of Ctrl-C when the compiler is done, minutes later.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
