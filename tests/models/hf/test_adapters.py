"""Adapters in PEFT's format: its names, its shapes, and its formula gives the merged weights."""

import json

import numpy as np
import pytest
from checkpoints import LLAMA, random_adapters, random_tensors, read, write

from searchrl_jax.models.decoder import forward, unembed
from searchrl_jax.models.hf import load_pretrained, save_adapters, save_pretrained
from searchrl_jax.models.lora import attach, merge

RANK, ALPHA = 3, 6.0


def test_the_base_and_what_peft_adds_are_the_merged_weights(tmp_path):
    """W' = W + alpha / r * B A, of torch's W [out, in], A [r, in] and B [out, r]."""
    config, params = load_pretrained(write(tmp_path / "base", LLAMA, random_tensors(LLAMA)))
    adapters = random_adapters(params, ("q", "o", "down"), RANK)
    save_adapters(tmp_path / "adapters", config, adapters, ALPHA)
    save_pretrained(tmp_path / "merged", config, merge(params, adapters, ALPHA / RANK))
    found, base, merged = read(tmp_path / "adapters"), read(tmp_path / "base"), read(tmp_path / "merged")
    targets = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    stems = [f"model.layers.{layer}.{target}" for layer in range(2) for target in targets]
    assert found.keys() == {f"base_model.model.{stem}.lora_{part}.weight" for stem in stems for part in "AB"}
    for stem in stems:
        a, b = (found[f"base_model.model.{stem}.lora_{part}.weight"] for part in "AB")
        want = base[f"{stem}.weight"] + ALPHA / RANK * b @ a
        np.testing.assert_allclose(merged[f"{stem}.weight"], want, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tmp_path / "base"),
        "r": RANK,
        "lora_alpha": ALPHA,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["down_proj", "o_proj", "q_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_peft_itself_reads_them_and_says_the_same(tmp_path):
    torch = pytest.importorskip("torch", reason="the reference runs in torch: make reference")
    peft = pytest.importorskip("peft", reason="the reference is PEFT: make reference")
    from transformers import AutoModelForCausalLM

    config, params = load_pretrained(write(tmp_path / "base", LLAMA, random_tensors(LLAMA)))
    adapters = random_adapters(params, ("q", "k", "v", "o", "gate", "up", "down"), RANK)
    save_adapters(tmp_path / "adapters", config, adapters, ALPHA)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (2, 12))
    with torch.no_grad():
        of_base = theirs(torch.tensor(tokens)).logits.numpy()
        want = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters")(torch.tensor(tokens)).logits.numpy()
    policy = attach(params, adapters, ALPHA / RANK)
    positions = np.broadcast_to(np.arange(12), tokens.shape)
    hidden = forward(config, policy, tokens, positions, np.ones_like(tokens))
    scale = np.abs(want).max()
    assert np.abs(of_base - want).max() > 0.1 * scale
    np.testing.assert_allclose(np.asarray(unembed(config, policy, hidden)), want, atol=2e-4 * scale)
