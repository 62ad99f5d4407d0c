"""Writing checkpoints: the same bits, all that came along, whole or not at all."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import LLAMA, OTHER_FILES, random_adapters, random_params, random_tensors, read, write

from searchrl_jax.models.hf import folder as folders
from searchrl_jax.models.hf import load_pretrained, save_pretrained
from searchrl_jax.models.lora import attach, merge
from searchrl_jax.testing.tiny import tiny_decoder_config


@pytest.fixture
def llama(tmp_path):
    return write(tmp_path / "llama", LLAMA, random_tensors(LLAMA))


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("qwen3", "float16")])
def test_a_round_trip_keeps_every_bit(tmp_path, family, dtype):
    config = LLAMA | {"model_type": family, "dtype": dtype}
    theirs = random_tensors(config)
    source = write(tmp_path / "source", config, theirs, shards=2)
    loaded = load_pretrained(source)
    save_pretrained(tmp_path / "saved", *loaded)
    found = read(tmp_path / "saved")
    assert found.keys() == theirs.keys()
    for name in theirs:
        assert found[name].dtype == theirs[name].dtype and found[name].tobytes() == theirs[name].tobytes(), name
    again = load_pretrained(tmp_path / "saved")
    assert again[0] == loaded[0]
    equal(again[1], loaded[1])
    for name in ("config.json", *OTHER_FILES):
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()


def test_code_and_weights_in_other_formats_stay_behind(tmp_path, llama):
    for name in ("modeling.py", "pytorch_model.bin"):
        (llama / name).write_text("import os")
    save_pretrained(tmp_path / "saved", *load_pretrained(llama))
    assert {each.name for each in (tmp_path / "saved").iterdir()} == {"config.json", "model.safetensors", *OTHER_FILES}


def test_large_models_are_sharded_with_an_index(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(folders, "SHARD_BYTES", 10_000)
    loaded = load_pretrained(llama)
    save_pretrained(tmp_path / "saved", *loaded)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "saved" / name).stat().st_size < 12_000 for name in files)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(loaded[1]))
    equal(load_pretrained(tmp_path / "saved")[1], loaded[1])


def test_the_configuration_declares_the_dtype_that_the_weights_have(tmp_path, llama):
    config, params = load_pretrained(llama)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    save_pretrained(tmp_path / "saved", config, narrow)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == LLAMA | {"dtype": "bfloat16"}
    equal(load_pretrained(tmp_path / "saved")[1], narrow)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"has_qk_norm": False, "has_tied_embedding": False},
        {"has_qk_norm": False, "has_qkv_bias": True},
    ],
)
def test_a_decoder_trained_from_nothing_is_saved_as_the_family_that_it_is_of(tmp_path, fields):
    config = dataclasses.replace(tiny_decoder_config(30, conv_width=0), **fields)
    params = random_params(config)
    save_pretrained(tmp_path / "saved", config, params)
    loaded, again = load_pretrained(tmp_path / "saved")
    assert dataclasses.asdict(loaded) == dataclasses.asdict(config) | {"source": str(tmp_path / "saved")}
    equal(again, params)


def test_what_no_other_program_could_load_is_refused(tmp_path):
    for config in (
        tiny_decoder_config(30),
        dataclasses.replace(tiny_decoder_config(30, conv_width=0), has_qkv_bias=True),
    ):
        with pytest.raises(ValueError, match="expected a decoder of a family that other programs know"):
            save_pretrained(tmp_path / "saved", config, {})
    assert not any(tmp_path.iterdir())


def test_parameters_of_another_configuration_are_refused_with_all_that_is_wrong(tmp_path, llama):
    config, params = load_pretrained(llama)
    layers = params["layers"]
    wrong = params | {"layers": layers | {"q": layers["q"][:1], "k": layers["k"].astype(jnp.bfloat16)}}
    wrong["more"] = jnp.zeros(3)
    del wrong["unembedding"]
    with pytest.raises(ValueError) as caught:
        save_pretrained(tmp_path / "saved", config, wrong)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "extra more",
        "misshaped layers/q: expected [2, 24, 4, 8], got [1, 24, 4, 8]",
        "missing unembedding",
        "mistyped layers/k: expected float32, as the embedding, got bfloat16",
    ]
    adapters = random_adapters(params, ("q",), 2)
    with pytest.raises(ValueError, match="merge adapters first"):
        save_pretrained(tmp_path / "saved", config, attach(params, adapters, 1.0))
    assert not (tmp_path / "saved").exists()


def test_merged_adapters_are_saved_as_full_weights(tmp_path, llama):
    config, params = load_pretrained(llama)
    merged = merge(params, random_adapters(params, ("q", "down"), 2), 2.0)
    save_pretrained(tmp_path / "saved", config, merged)
    equal(load_pretrained(tmp_path / "saved")[1], merged)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, llama, monkeypatch):
    loaded = load_pretrained(llama)
    before = {each.name: each.read_bytes() for each in llama.iterdir()}
    with pytest.raises(ValueError, match="llama: expected a new or an empty folder"):
        save_pretrained(llama, *loaded)
    assert {each.name: each.read_bytes() for each in llama.iterdir()} == before

    def fails(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(folders, "write_file", fails)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(tmp_path / "saved", *loaded)
    assert {each.name for each in tmp_path.iterdir()} == {"llama"}
    monkeypatch.undo()
    (tmp_path / "saved").mkdir()
    save_pretrained(tmp_path / "saved", *loaded)
    assert (tmp_path / "saved" / "config.json").is_file()
    modes = {each.stat().st_mode for each in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1, "weights can be read by whoever can read the configuration"


def test_a_source_that_is_gone_or_changed_is_said(tmp_path, llama):
    config, params = load_pretrained(llama)
    with pytest.raises(ValueError, match="llama: expected the configuration .* which was loaded from there"):
        save_pretrained(tmp_path / "saved", dataclasses.replace(config, rope_theta=1.0), params)
    llama.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="llama: expected a folder with a config.json"):
        save_pretrained(tmp_path / "saved", config, params)
