"""Operations, bytes and traffic of compiled programs, counted from their text, against hand-counted ones."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from searchrl_jax.planning.cost import cost_of, group_size, largest_temporaries, trip_count
from searchrl_jax.planning.hlo import parse

# As a TPU's compiler writes it, without what nobody reads. The loop runs 6 times; each time a fusion reads one of 6
# layers, a gather brings the other half of it, a product follows, and the result goes to its place in the stack.
LOOP = (Path(__file__).parent / "loop.hlo.txt").read_text()
LAYER, WHOLE, PLACE = 2 * 512 * 512, 2 * 1024 * 512, 2 * 128 * 1024  # bytes


def test_a_loop_counts_as_often_as_it_runs_and_slices_count_as_slices():
    cost = cost_of(parse(LOOP))
    assert cost.flops == 6 * 2 * 128 * 512 * 1024
    # Of 4 chips in groups of 2 each has half of the layer already.
    assert cost.collective_bytes == {"all-gather": 6 * WHOLE / 2}
    # A layer is read and written by the fusion (with a counter), read by the gather, and the whole written and read by
    # the product, whose input lies in the chip's own memory and whose result is a part of the stack.
    assert cost.hbm_bytes == 6 * (2 * LAYER + LAYER + 2 * WHOLE + PLACE + 4 + 4)


def test_a_loop_without_a_constant_runs_as_often_as_the_caller_says():
    text = LOOP.replace("constant(6)", "parameter(1)")
    assert trip_count(parse(LOOP), "condition") == 6 and trip_count(parse(text), "condition") is None
    once = cost_of(parse(text)).flops
    assert cost_of(parse(text), open_trips=lambda where: 2.5 if "layers/3/" in where else 0).flops == 2.5 * once


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "products"),
    [
        ("f32[8,16]", "f32[16,32]", "f32[8,32]", "dim_labels=bf_io->bf", 8 * 32 * 16),
        # A batch of 12 products, as a spatial dimension of which each output meets one element.
        (
            "f32[12,8,16]",
            "f32[12,16,32]",
            "f32[12,8,32]",
            "window={size=12 stride=11 lhs_dilate=12}, dim_labels=0bf_0io->0bf",
            12 * 8 * 32 * 16,
        ),
        (
            "f32[5,12,8,16]",
            "f32[5,12,16,32]",
            "f32[5,12,8,32]",
            "window={size=5x12 stride=4x11 lhs_dilate=5x12}, dim_labels=01bf_01io->01bf",
            5 * 12 * 8 * 32 * 16,
        ),
        ("f32[8,2,16]", "f32[2,16,32]", "f32[8,1,32]", "window={size=2}, dim_labels=b0f_0io->b0f", 8 * 32 * 2 * 16),
        # Taps outside of the input: 3 outputs of 2 taps on 2 elements.
        (
            "f32[4,2,16]",
            "f32[2,32,16]",
            "f32[4,3,32]",
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=b0f_0oi->b0f",
            4 * 32 * 16 * 4,
        ),
    ],
)
def test_products_that_a_tpu_writes_as_convolutions(left, right, result, attributes, products):
    text = f"""ENTRY %main (a: {left}, b: {right}) -> {result} {{
  %a = {left}{{0}} parameter(0)
  %b = {right}{{0}} parameter(1)
  ROOT %y = {result}{{0}} convolution(%a, %b), {attributes}
}}"""
    assert cost_of(parse(text)).flops == 2 * products


def test_the_programs_of_this_machine_are_counted_too():
    def f(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    w, x = jax.ShapeDtypeStruct((7, 96, 96), jnp.float32), jax.ShapeDtypeStruct((160, 96), jnp.float32)
    program = parse(jax.jit(jax.grad(f)).lower(w, x).compile().as_text())
    # Forward, the gradient of the input and that of the weights.
    assert cost_of(program).flops == pytest.approx(3 * 7 * 2 * 160 * 96 * 96)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,8]<=[16]", 8),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=3] {'axis_1','axis_2'}", 12),
    ],
)
def test_sizes_of_groups(groups, size):
    assert group_size(f", channel_id=1, {groups}, dimensions={{1}}") == size


def test_collectives_of_several_arrays_and_asynchronous_ones_count_what_arrives():
    text = """ENTRY %main (a: f32[1000], b: f32[10]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %both = (f32[1000]{0}, f32[10]{0}) all-reduce(%a, %b), replica_groups={{0,1,2,3}}, to_apply=%add
  %begun = (f32[1000]{0}, f32[10]{0}) all-reduce-start(%a, %b), replica_groups={{0,1,2,3}}, to_apply=%add
  %gather = ((f32[1000]{0}, f32[10]{0}), (f32[2000]{0}, f32[20]{0})) all-gather-start(%a, %b), replica_groups=[2,2]<=[4]
  %sent = (f32[1000]{0}, f32[1000]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a), channel_id=1
  ROOT %x = f32[1000]{0} collective-permute-done(%sent)
}"""
    assert cost_of(parse(text)).collective_bytes == {
        "all-reduce": 2 * 2 * 3 / 4 * 4 * 1010,
        "all-gather": 4 * 2020 / 2,
        "collective-permute": 4 * 1000,
    }


def test_the_largest_temporary_is_named_with_its_place_in_the_model():
    (shape, where), *_ = largest_temporaries(parse(LOOP))
    assert str(shape) == "bf16[6,128,1024]" and where.op_name == "jit(f)/while/body/dot_general"


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule empty")
