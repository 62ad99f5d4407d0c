"""A plan in words: tables, whether it fits, and what to change where it doesn't."""

from searchrl_jax.config.schema import Experiment
from searchrl_jax.evaluation.tables import markdown_rows
from searchrl_jax.planning.chips import Chip
from searchrl_jax.planning.plan import Compiled, Plan

GIB = 2**30


def bounds(program: Compiled, chip: Chip) -> dict[str, float]:
    """The seconds that one run takes at least, by what takes them.

    operations / (operations a second), bytes to and from memory / bandwidth, bytes from other chips / bandwidth
    """
    cost = program.cost
    return {
        "arithmetic": cost.flops / chip.flops,
        "memory": cost.hbm_bytes / chip.hbm_bandwidth,
        "links": sum(cost.collective_bytes.values()) / chip.ici_bandwidth,
    }


def report(plan: Plan, chip: Chip) -> str:
    """Memory per chip by kind, and what each program does and how fast it can be at best."""
    memory = [["memory per chip", "GiB"]]
    memory += [[kind, f"{size / GIB:.3g}"] for kind, size in plan.resident.items()]
    for each in plan.programs:
        memory.append([f"temporaries of the {each.name}", f"{each.temporaries / GIB:.3g}"])
    memory += [["code of the larger program", f"{max(each.code for each in plan.programs) / GIB:.3g}"]]
    memory += [["at most, together", f"{plan.peak / GIB:.3g} of {chip.hbm_bytes / GIB:.3g}"]]

    rows: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        rows.setdefault(name, []).append(value)

    for each in plan.programs:
        cost, seconds = each.cost, bounds(each, chip)
        slowest = max(seconds, key=seconds.__getitem__)
        add("of one run, on each chip", each.name)
        add("tokens, on all chips together", f"{each.tokens:,}")
        add("floating-point operations", f"{cost.flops:.3g}")
        add("bytes to and from memory", f"{cost.hbm_bytes:.3g}")
        for kind in sorted({kind for program in plan.programs for kind in program.cost.collective_bytes}):
            add(f"bytes of {kind}", f"{cost.collective_bytes[kind]:.3g}")
        for kind, least in seconds.items():
            add(f"seconds at least, for {kind}", f"{least:.3g}")
        add("bound by", slowest)
        add("tokens a second at most", f"{each.tokens / seconds[slowest]:,.0f}" if seconds[slowest] else "-")
        add("compiled in, s", f"{each.seconds:.0f}")
    return f"{markdown_rows(memory, left=1)}\n{markdown_rows([[name, *cells] for name, cells in rows.items()], left=1)}"


def verdict(plan: Plan, chip: Chip, experiment: Experiment) -> tuple[bool, str]:
    """Whether the plan fits, and the line or lines that say so."""
    overflow = next((each for each in plan.programs if each.overflow), None)
    if overflow is None and plan.peak <= chip.hbm_bytes:
        return True, f"fits: {plan.peak / chip.hbm_bytes:.0%} of a chip's memory at most"
    largest = overflow or max(plan.programs, key=lambda each: each.temporaries)
    kinds = {**plan.resident, f"temporaries of the {largest.name}": largest.temporaries}
    blamed = max(kinds, key=kinds.__getitem__)
    lines = [
        f"does not fit: {plan.peak / GIB:.1f} GiB of {chip.hbm_bytes / GIB:.3g} on each chip; "
        f"most of it: {blamed}, {kinds[blamed] / GIB:.1f} GiB"
    ]
    if blamed.startswith("temporaries"):
        shape, size, where = largest.largest[0]
        lines.append(f"largest tensor: {shape}, {size / GIB:.2f} GiB" + (f", of {where}" if where else ""))
    lines.append(f"change: {_advice(blamed, plan, experiment)}")
    return False, "\n".join(lines)


def _advice(blamed: str, plan: Plan, experiment: Experiment) -> str:
    if blamed == "cache of the rollouts" or "decoding" in blamed:
        return (
            f"lower rollout.rollout_max_concurrency ({experiment.rollout.rollout_max_concurrency}) or "
            f"env.max_tokens_per_episode ({experiment.env.max_tokens_per_episode}), or take more chips"
        )
    if not blamed.startswith("temporaries"):
        lora = "" if experiment.lora.lora_rank else "train adapters (lora.lora_rank), or "
        return f"{lora}share the weights among more chips (mesh.fsdp, mesh.tensor: {dict(plan.mesh.shape)})"
    remat = "" if experiment.optimizer.remat else "set optimizer.remat=True, or "
    rows = plan.programs[0].tokens // experiment.env.max_tokens_per_episode
    shares = plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
    fewer = f"lower batch.micro_batch_rows ({experiment.batch.micro_batch_rows}), or " if rows > shares else ""
    return (
        f"{remat}{fewer}lower env.max_tokens_per_episode ({experiment.env.max_tokens_per_episode}), or share each row "
        f"among more chips (mesh.tensor, {plan.mesh.shape['tensor']} now)"
    )
