"""MXFP4: every code and scale by the definition of the format, and a checkpoint of such tensors."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.models.hf.mxfp4 import dequantise, dequantised
from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor


def e2m1(code):
    """A number of 4 bits: sign, 2 bits of exponent with bias 1, 1 of mantissa; no exponent, no leading 1."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return math.copysign(magnitude, -1 if sign else 1)


def by_the_definition(blocks, scales):
    experts, outside, groups, _ = blocks.shape
    found = np.zeros((experts, 32 * groups, outside))
    for e in range(experts):
        for o in range(outside):
            for g in range(groups):
                for i in range(32):
                    code = blocks[e, o, g, i // 2] >> (4 * (i % 2)) & 15
                    found[e, 32 * g + i, o] = e2m1(int(code)) * 2.0 ** (int(scales[e, o, g]) - 127)
    return found


def drawn():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (2, 3, 2, 16), np.uint8), rng.integers(100, 140, (2, 3, 2), np.uint8)


def test_weights_are_those_of_the_definition():
    blocks, scales = drawn()
    got = dequantise(blocks, scales)
    assert got.dtype == jnp.bfloat16 and got.shape == (2, 64, 3)
    np.testing.assert_array_equal(got.astype(np.float64), by_the_definition(blocks, scales))


def test_all_sixteen_codes():
    blocks = np.zeros((1, 1, 1, 16), np.uint8)
    blocks[0, 0, 0, :8] = [2 * i + 16 * (2 * i + 1) for i in range(8)]
    got = dequantise(blocks, np.full((1, 1, 1), 128, np.uint8))[0, :16, 0].tolist()
    assert got == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def test_pairs_appear_as_the_tensors_that_they_stand_for():
    blocks, scales = drawn()
    stored = {"a_blocks": blocks, "a_scales": scales, "b": np.ones(2, np.float32), "c_blocks": blocks}
    tensors = {name: StoredTensor(x.shape, x.dtype, lambda x=x: x) for name, x in stored.items()}
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    found = dequantised(StoredCheckpoint("here", config, tensors, {}))
    assert found.config == {"model_type": "gpt_oss"} and found.tensors.keys() == {"a", "b", "c_blocks"}
    assert found.tensors["a"].shape == (2, 64, 3)
    np.testing.assert_array_equal(found.tensors["a"].read(), dequantise(blocks, scales))
    plain = StoredCheckpoint("here", {"model_type": "gpt_oss"}, tensors, {})
    assert dequantised(plain) is plain


def test_pairs_that_do_not_fit_are_one_error_that_lists_them():
    blocks, scales = drawn()
    faulty = {
        "a_blocks": blocks,
        "a_scales": scales[:, :1],  # numpy would stretch them
        "b_blocks": blocks.astype(np.int8),
        "b_scales": scales,
        "c_blocks": blocks[..., :8],
        "c_scales": scales,
        "d_blocks": blocks,
        "d_scales": np.full_like(scales, 255),
    }
    tensors = {name: StoredTensor(x.shape, x.dtype, lambda x=x: x) for name, x in faulty.items()}
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ValueError, match="here: expected pairs of MXFP4 tensors") as caught:
        dequantised(StoredCheckpoint("here", config, tensors, {}))
    assert [line.strip().split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "a_scales",
        "b_blocks",
        "c_blocks",
    ]
    alone = {name: tensors[name] for name in ("d_blocks", "d_scales")}
    with pytest.raises(ValueError, match="d_scales: expected numbers, got 255"):
        dequantised(StoredCheckpoint("here", config, alone, {})).tensors["d"].read()
    for none in (None, "mxfp4"):
        other = StoredCheckpoint("here", config | {"quantization_config": none}, tensors, {})
        assert dequantised(other) is other


@pytest.mark.peers
def test_transformers_makes_the_same_of_them():
    torch = pytest.importorskip("torch", reason="the reference runs in torch: make reference")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn()
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    np.testing.assert_array_equal(dequantise(blocks, scales).astype(np.float32), want)
