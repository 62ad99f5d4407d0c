"""MXFP4: weights of 4 bits, 32 to a scale, as what they stand for.

    w = (-1) ** sign * e2m1 * 2 ** (scale - 127)        e2m1 in 0, 0.5, 1, 1.5, 2, 3, 4, 6

A tensor [experts, out, in] is stored as `*_blocks` [experts, out, in / 32, 16], two numbers to a byte, the lower four
bits first, and `*_scales` [experts, out, in / 32]. What transformers makes of it, and what it saves unquantised, is
[experts, in, out] in bfloat16.

Source:
    Open Compute Project, OCP Microscaling Formats (MX) Specification v1.0, 2023, sections 5.3.3 and 5.4.1.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from searchrl_jax.models.hf.stored import StoredCheckpoint, StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
QUANTISED = "quantization_config"
BFLOAT16 = jnp.dtype("bfloat16")

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)


def dequantised(stored: StoredCheckpoint) -> StoredCheckpoint:
    """The checkpoint with each pair of blocks and scales as one bfloat16 tensor; another one as it is.

    Raises:
        ValueError: blocks or scales are misshaped or mistyped. The message lists all of them.
    """
    quantised = stored.config.get(QUANTISED)
    if not isinstance(quantised, dict) or quantised.get("quant_method") != "mxfp4":
        return stored
    tensors, faults = dict(stored.tensors), []
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        stem = name.removesuffix(BLOCKS)
        if stem + SCALES in tensors:
            blocks, scales = tensors.pop(name), tensors.pop(stem + SCALES)
            if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or blocks.dtype != np.uint8:
                faults.append(f"{name}: expected uint8[experts, out, in / 32, 16], got {blocks}")
            elif scales.shape != blocks.shape[:-1] or scales.dtype != np.uint8:
                faults.append(f"{stem}{SCALES}: expected uint8{list(blocks.shape[:-1])}, as its blocks, got {scales}")
            else:
                tensors[stem] = _pair(stem, blocks, scales)
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{stored.where}: expected pairs of MXFP4 tensors; fetch the checkpoint anew:\n  {listed}")
    config = {key: value for key, value in stored.config.items() if key != QUANTISED}
    return dataclasses.replace(stored, config=config, tensors=tensors)


def _pair(name: str, blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    experts, outside, groups, _ = blocks.shape
    shape = (experts, 32 * groups, outside)
    return StoredTensor(shape, BFLOAT16, functools.partial(_read, name, blocks, scales))


def _read(name: str, blocks: StoredTensor, scales: StoredTensor) -> np.ndarray:
    read = scales.read()
    if (read == 255).any():
        raise ValueError(f"{name}{SCALES}: expected numbers, got 255, which stands for none; fetch the checkpoint anew")
    return dequantise(blocks.read(), read)


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights [experts, in, out] of blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32], of uint8."""
    experts, outside, groups, _ = blocks.shape
    weights = np.empty((experts, 32 * groups, outside), BFLOAT16)
    for expert in range(experts):  # one at a time, since the way there is wider than the result
        pairs = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1).reshape(outside, groups, 32)
        exponent = scales[expert].astype(np.int32) - 127
        weights[expert] = np.ldexp(_VALUES[pairs], exponent[..., None]).reshape(outside, -1).T
    return weights
