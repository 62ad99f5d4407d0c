"""A checkpoint of every family, named by another hand: read as the parameters it was made of, written bit for bit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from families import FAMILIES, common_settings, drawn, for_transformers
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from searchrl_jax.models.hf import load_pretrained, save_pretrained
from searchrl_jax.models.hf.config import pretrained_config


def write(folder, family, dtype):
    spec = FAMILIES[family]
    of_text = getattr(transformers, f"{spec.model}TextConfig", None)
    of_family = of_text or getattr(transformers, f"{spec.model}Config")
    of_family(**{**common_settings(spec.config), **spec.settings, "dtype": dtype}).save_pretrained(folder)
    tensors = for_transformers(family, drawn(spec.config, "weights"))
    if spec.config.has_tied_embedding:
        del tensors["lm_head.weight"]
    tensors = {name: x.astype(jnp.dtype(dtype)) for whole in tensors.items() for name, x in as_saved(family, *whole)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def as_saved(family, name, x):
    """qwen3_moe's checkpoints have each expert's matrices by themselves."""
    if family != "qwen3_moe" or ".experts." not in name:
        return [(name, x)]
    stem, kind = name.split("experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return [
        (f"{stem}experts.{expert}.{part}.weight", np.ascontiguousarray(matrix))
        for expert, both in enumerate(x)
        for part, matrix in zip(parts, np.split(both, len(parts)), strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_read_and_written_bit_for_bit(tmp_path, family):
    tensors = write(tmp_path / "source", family, "float32")
    config, params = load_pretrained(tmp_path / "source")
    assert config == pretrained_config(FAMILIES[family].config, "")
    found, want = flatten_dict(params, sep="/"), drawn(FAMILIES[family].config, "weights")
    assert found.keys() == want.keys()
    for name, x in want.items():
        # What qwen3_5 stores less 1 is rounded on the way there.
        np.testing.assert_allclose(found[name], x, rtol=0, atol=3e-7 if name.endswith("scale") else 0, err_msg=name)
    save_pretrained(tmp_path / "saved", config, params)
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: x.tobytes() for name, x in again.items()} == {name: x.tobytes() for name, x in tensors.items()}
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        (tmp_path / "source" / "config.json").read_text()
    )


def test_norms_stored_less_1_keep_the_bits_that_did_not_change(tmp_path):
    """1 + w in bfloat16 has two digits: it's computed with in float32, and what was not trained is saved as it was."""
    tensors = write(tmp_path / "source", "qwen3_5", "bfloat16")
    config, params = load_pretrained(tmp_path / "source")
    scale = params["final_norm"]["scale"]
    want = tensors["model.norm.weight"].astype(np.float32) + 1
    np.testing.assert_array_equal(scale, want)
    assert scale.dtype == np.float32 and params["embedding"].dtype == jnp.bfloat16
    params["final_norm"] = {"scale": scale.at[0].set(1.5)}
    save_pretrained(tmp_path / "saved", config, params)
    again = load_file(tmp_path / "saved" / "model.safetensors")
    changed = again["model.norm.weight"]
    assert changed[0] == 0.5 and changed[1:].tobytes() == tensors["model.norm.weight"][1:].tobytes()
    for name in tensors.keys() - {"model.norm.weight"}:
        assert again[name].dtype == jnp.bfloat16 and again[name].tobytes() == tensors[name].tobytes(), name
