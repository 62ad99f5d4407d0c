"""What a compiled program does on one chip, loops counted as often as they run."""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from searchrl_jax.planning.hlo import Computation, Instruction, Program, Shape

# What arrives at a chip, over the result's bytes, in a group of n: an all-reduce is a reduce-scatter and an all-gather.
COLLECTIVES: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
# What moves nothing, or is counted where it is called.
_FREE = frozenset(
    ["parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"]
    + ["partition-id", "replica-id", "optimization-barrier", "async-start", "async-update"]
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass
class Cost:
    """Of one run of a program, on one chip.

    Attributes:
        flops: floating-point operations of matrix products and convolutions; a multiply-add is two.
        hbm_bytes: read from the chip's main memory and written to it.
        collective_bytes: that arrive from other chips, by kind.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    collective_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Adds `times` the other."""
        self.flops += times * other.flops
        self.hbm_bytes += times * other.hbm_bytes
        for kind, count in other.collective_bytes.items():
            self.collective_bytes[kind] += times * count


def cost_of(program: Program, *, open_trips: Callable[[str], float] = lambda op_name: 1.0) -> Cost:
    """The cost of one run.

    A loop runs as often as the constant says that its condition compares with. Of a branch the dearest side counts.

    Args:
        open_trips: how often a loop runs whose condition compares with no constant, as those of `ops.blockwise`, by
            where in the traced program it stands.
    """

    @functools.cache
    def of(name: str) -> Cost:
        total, computation = Cost(), program.computations[name]
        for each in computation.instructions:
            _add(total, each, computation)
        return total

    @functools.cache
    def inside(name: str) -> Cost:
        """Of a fusion: what it computes and sends, but no memory, since its parts never reach it."""
        total = Cost()
        total.add(of(name))
        total.hbm_bytes = 0.0
        return total

    def _add(total: Cost, each: Instruction, computation: Computation) -> None:
        if each.opcode == "while":
            body, condition = each.called("body"), each.called("condition")
            assert body and condition
            trips = trip_count(program, condition)
            total.add(of(body), open_trips(each.op_name) if trips is None else trips)
            return
        if each.opcode == "conditional":
            sides = re.findall(r"%([^\s,{}]+)", each.attributes.split("metadata")[0])
            sides = [side for side in sides if side in program.computations]
            total.add(max((of(side) for side in sides), key=lambda cost: (cost.flops, cost.hbm_bytes), default=Cost()))
            return
        called = each.called("calls") or (each.called("to_apply") if each.opcode == "call" else None)
        if called in program.computations and called is not None:
            total.add(inside(called) if each.opcode == "fusion" else of(called))
        if each.opcode in ("convolution", "dot"):
            total.flops += product_flops(each, computation)
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            arrived = sum(shape.bytes for shape in _results(each))
            total.collective_bytes[kind] += COLLECTIVES[kind](group_size(each.attributes)) * arrived
        total.hbm_bytes += moved(program, each, computation)

    return of(program.entry)


def trip_count(program: Program, condition: str) -> int | None:
    """The constant that a loop's condition compares its counter with; None if there is none."""
    computation = program.computations[condition]
    called = [each.called("calls") for each in computation.instructions]
    parts = [computation, *(program.computations[name] for name in called if name and name in program.computations)]
    if not any(each.opcode == "compare" for part in parts for each in part.instructions):
        return None
    constants = [
        int(each.operands[0])
        for part in parts
        for each in part.instructions
        if each.opcode == "constant" and each.shapes[0].dtype in ("s32", "u32") and not each.shapes[0].dims
    ]
    return max(constants, default=None)


def product_flops(each: Instruction, computation: Computation) -> float:
    """Floating-point operations of a `dot` or a `convolution`, which is what a TPU makes of a dot.

        2 * (elements of the result) * (products that are summed up in each)

    A batch dimension of a dot is there a spatial one, dilated so that each output meets a single element of the
    kernel: taps that fall on padding or between elements are not counted.
    """
    result = each.shapes[0]
    left, right = (computation.by_name[name].shapes[0] for name in each.operands[:2])
    if each.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
        axes = [int(axis) for axis in found.group(1).split(",") if axis] if found else []
        return 2.0 * math.prod(result.dims) * math.prod(left.dims[axis] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    assert labels is not None
    of_input, of_kernel, of_result = labels.groups()
    size = dict(zip(of_result, result.dims, strict=True))
    summed = right.dims[of_kernel.index("i")]
    spatial = sorted(label for label in of_result if label.isdigit())
    taps = 1.0
    for place, label in enumerate(spatial):
        window = {
            name: _window(each.attributes, name, place)
            for name in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
        }
        taps *= _valid_taps(left.dims[of_input.index(label)], size[label], window)
    return 2.0 * size["b"] * size["f"] * summed * taps


def _window(attributes: str, name: str, place: int) -> int:
    """The `name` of a convolution's window along one spatial dimension; of `pad` what comes before."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    found = re.search(rf"(?:^|\s){name}=(\S+)", window.group(1)) if window else None
    if found is None:
        return 0 if name == "pad" else 1
    return int(found.group(1).split("x")[place].split("_")[0])


def _valid_taps(inputs: int, outputs: int, window: dict[str, int]) -> int:
    """Pairs of an output and a tap that meet an element of the input."""
    last = (inputs - 1) * window["lhs_dilate"]
    if window["size"] == 1 and window["lhs_dilate"] == 1 and window["pad"] == 0:
        return min(outputs, last // window["stride"] + 1)
    count = 0
    for tap in range(window["size"]):
        begin = tap * window["rhs_dilate"] - window["pad"]
        at = range(begin, begin + outputs * window["stride"], window["stride"])
        count += sum(0 <= each <= last and each % window["lhs_dilate"] == 0 for each in at)
    return count


def group_size(attributes: str) -> int:
    """How many chips take part in a collective together."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return max(len(found.group(1).split(",")), 1)
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(found.group(2))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found.group(2)))
    return 2  # of a permutation, whose size doesn't matter


def _results(each: Instruction) -> tuple[Shape, ...]:
    """What a collective or a copy gives. The start of an asynchronous one gives its operands too, and marks of its own,
    but for an all-reduce."""
    if not each.opcode.endswith("-start") or each.opcode == "all-reduce-start":
        return each.shapes
    return each.shapes[len(each.operands) : 2 * len(each.operands)]


def moved(program: Program, each: Instruction, computation: Computation) -> float:
    """Bytes that one instruction reads from main memory and writes to it.

    Of what it only takes a slice from, or puts one into, the slice counts.
    """
    if each.opcode in _FREE or each.opcode.endswith("-done"):
        return 0.0
    if each.opcode.endswith("-start"):  # a copy, or a collective: once out of main memory, once into it
        operands = [computation.by_name[name].shapes[0] for name in each.operands if name in computation.by_name]
        return _in_hbm(*operands, *_results(each))
    shapes = [computation.by_name[name].shapes for name in each.operands if name in computation.by_name]
    if each.opcode in _SLICES:
        return 2 * _in_hbm(*each.shapes) if _in_hbm(*shapes[0]) else _in_hbm(*each.shapes)
    if each.opcode == "dynamic-update-slice":
        return 2 * _in_hbm(*shapes[1])
    body = _fused(program, each)
    if body is None:
        return _in_hbm(*(shape for operand in shapes for shape in operand), *each.shapes)
    read = sum(_read(program, body, place, _in_hbm(*operand)) for place, operand in enumerate(shapes))
    return read + _written(program, body, each.shapes)


def _in_hbm(*shapes: Shape) -> float:
    return sum(shape.bytes for shape in shapes if shape.is_in_hbm)


def _read(program: Program, body: Computation, place: int, whole: float) -> float:
    """What a fusion reads of its operand number `place`."""
    parameter = next(
        (each for each in body.instructions if each.opcode == "parameter" and each.operands[0] == str(place)), None
    )
    if parameter is None or whole == 0:
        return whole
    total, waiting = 0.0, [parameter]
    while waiting:
        source = waiting.pop()
        for user in body.users[source.name]:
            inner = _fused(program, user)
            if user.opcode == "bitcast":
                waiting.append(user)
            elif inner is not None:
                places = [at for at, name in enumerate(user.operands) if name == source.name]
                total += sum(_read(program, inner, at, whole) for at in places)
            elif user.opcode in _SLICES and user.operands[0] == source.name:
                total += sum(shape.bytes for shape in user.shapes)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != source.name:
                return whole
    return min(total, whole)


def _written(program: Program, body: Computation, shapes: Sequence[Shape]) -> float:
    """What a fusion writes into its results `shapes`: of an array that it updates in place, the update."""
    root = next(line for line in body.instructions if line.is_root)
    parts = [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for part, shape in zip(parts, shapes, strict=False):
        while part.opcode == "bitcast" and part.operands[0] in body.by_name:
            part = body.by_name[part.operands[0]]
        inner = _fused(program, part)
        if inner is not None:
            total += _written(program, inner, [shape])
        elif part.opcode == "dynamic-update-slice":
            total += body.by_name[part.operands[1]].shapes[0].bytes if shape.is_in_hbm else 0.0
        else:
            total += _in_hbm(shape)
    return total


def _fused(program: Program, each: Instruction) -> Computation | None:
    return program.computations.get(each.called("calls") or "") if each.opcode == "fusion" else None


def largest_temporaries(program: Program, count: int = 5) -> list[tuple[Shape, Instruction]]:
    """The largest arrays in main memory that the program makes on its way, each kind once, the largest first."""
    fused = {
        each.called("calls")
        for computation in program.computations.values()
        for each in computation.instructions
        if each.opcode == "fusion"
    }
    found: dict[str, tuple[Shape, Instruction]] = {}
    for name, computation in program.computations.items():
        if name in fused:
            continue
        for each in computation.instructions:
            if each.opcode in _FREE or each.opcode.endswith("-done"):
                continue
            for shape in each.shapes:
                known = found.get(str(shape))
                if shape.is_in_hbm and (known is None or (each.op_name and not known[1].op_name)):
                    found[str(shape)] = (shape, each)
    return sorted(found.values(), key=lambda pair: -pair[0].bytes)[:count]
