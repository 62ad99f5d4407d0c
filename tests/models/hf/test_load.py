"""Reading checkpoints: layouts element by element, strictness, placement, and where they come from."""

import json
import math

import jax
import numpy as np
import pytest
from checkpoints import LLAMA, random_tensors, shapes, write
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from searchrl_jax.models.hf import hub, load_pretrained
from searchrl_jax.models.hf.outline import outline
from searchrl_jax.models.hf.place import fill
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.text.pretrained import end_token


@pytest.fixture
def llama(tmp_path):
    return write(tmp_path / "llama", LLAMA, random_tensors(LLAMA))


def test_a_configuration_is_read_in_full(llama):
    config, _ = load_pretrained(llama)
    assert (config.vocab_size, config.num_layers, config.model_dim, config.ff_dim) == (30, 2, 24, 40)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.rope_theta, config.norm_epsilon, config.conv_width) == (5000.0, 1e-5, 0)
    assert (config.has_tied_embedding, config.has_qk_norm, config.has_qkv_bias) == (False, False, False)


@pytest.mark.parametrize("shards", [1, 3])
def test_each_element_goes_to_its_place(tmp_path, shards):
    """In torch, y = W x: rows are outputs, and head n's are n * 8 to n * 8 + 7."""
    theirs = random_tensors(LLAMA)
    _, params = load_pretrained(write(tmp_path / "llama", LLAMA, theirs, shards))
    layers = params["layers"]
    for layer in range(2):
        at = f"model.layers.{layer}."
        for d in range(24):
            assert layers["attention_norm"]["scale"][layer, d] == theirs[at + "input_layernorm.weight"][d]
            assert layers["mlp_norm"]["scale"][layer, d] == theirs[at + "post_attention_layernorm.weight"][d]
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            ours, want = np.array(layers[name][layer]), theirs[at + f"self_attn.{name}_proj.weight"]
            assert all(ours[d, n, h] == want[n * 8 + h, d] for d in range(24) for n in range(heads) for h in range(8))
        ours, want = np.array(layers["o"][layer]), theirs[at + "self_attn.o_proj.weight"]
        assert all(ours[i, d] == want[d, i] for i in range(32) for d in range(24))
        for name in ("gate", "up", "down"):
            np.testing.assert_array_equal(layers[name][layer], theirs[at + f"mlp.{name}_proj.weight"].T)
    np.testing.assert_array_equal(params["embedding"], theirs["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["unembedding"], theirs["lm_head.weight"])
    np.testing.assert_array_equal(params["final_norm"]["scale"], theirs["model.norm.weight"])


def test_biases_and_norms_of_heads_go_to_their_places(tmp_path):
    qwen2 = LLAMA | {"model_type": "qwen2"}
    theirs = random_tensors(qwen2)
    config, params = load_pretrained(write(tmp_path / "qwen2", qwen2, theirs))
    assert config.has_qkv_bias and not config.has_qk_norm
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        ours, want = np.array(params["layers"][f"{name}_bias"][1]), theirs[f"model.layers.1.self_attn.{name}_proj.bias"]
        assert all(ours[n, h] == want[n * 8 + h] for n in range(heads) for h in range(8))
    qwen3 = LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True}
    theirs = random_tensors(qwen3)
    config, params = load_pretrained(write(tmp_path / "qwen3", qwen3, theirs))
    assert config.has_qk_norm and config.has_tied_embedding and "unembedding" not in params
    want = theirs["model.layers.1.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(params["layers"]["k_norm"]["scale"][1], want)


def test_what_is_wrong_with_tensors_is_one_error_that_lists_all_of_it(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 24), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["lm_head.weight"] = np.zeros((24, 30), np.float32)
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((24, 32), np.float16)
    tensors["model.layers.1.self_attn.o_proj.weight"] = np.zeros((24, 32), np.int32)
    with pytest.raises(ValueError) as caught:
        load_pretrained(write(tmp_path / "llama", LLAMA, tensors))
    first, *listed = str(caught.value).splitlines()
    assert "llama: expected the tensors that its config.json describes, found 7 faults" in first
    assert sorted(line.strip() for line in listed) == [
        "extra model.layers.0.self_attn.q_proj.bias",
        "extra model.layers.2.mlp.up_proj.weight",
        "misshaped lm_head.weight: expected [30, 24], got [24, 30]",
        "missing model.layers.1.mlp.up_proj.weight",
        "missing model.norm.weight",
        "mistyped model.layers.0.self_attn.o_proj.weight: expected float32, got float16",
        "mistyped model.layers.1.self_attn.o_proj.weight: expected float32, got int32",
    ]


def test_whole_numbers_are_no_weights(tmp_path):
    config = {name: value for name, value in LLAMA.items() if name != "dtype"}
    tensors = {name: x.astype(np.int32) for name, x in random_tensors(LLAMA).items()}
    with pytest.raises(ValueError, match=f"found {len(tensors)} faults") as caught:
        load_pretrained(write(tmp_path / "llama", config, tensors))
    assert "mistyped model.norm.weight: expected float32 or bfloat16 or" in str(caught.value)


def test_nothing_is_cast(tmp_path):
    narrow = LLAMA | {"dtype": "bfloat16"}
    theirs = random_tensors(narrow)
    _, params = load_pretrained(write(tmp_path / "narrow", narrow, theirs))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("bfloat16")}
    old = {name: value for name, value in narrow.items() if name != "dtype"} | {"torch_dtype": "float16"}
    with pytest.raises(ValueError, match=f"found {len(theirs)} faults") as caught:
        load_pretrained(write(tmp_path / "old", old, theirs))
    assert "mistyped model.norm.weight: expected float16, got bfloat16" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bert"}, "expected model_type to be one of llama, .* got 'bert'"),
        ({"attention_bias": True}, "expected attention_bias False, got True"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "expected quantization_config None, got {'quant_method': 'fp8'}",
        ),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu', got 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "expected rope_type 'default', got 'linear'",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention", "full_attention"]},
            "expected layer_types of full_attention alone, got sliding_attention",
        ),
        ({"num_hidden_layers": "2"}, "expected what describes a model of the family llama, but .*num_hidden_layers"),
        ({"rope_theta": "10000"}, "expected what describes a model of the family llama"),
        ({"num_attention_heads": 0}, "expected what describes a model of the family llama"),
        ({"dtype": "int32"}, "expected dtype to be one of float32, bfloat16, float16, float64, got 'int32'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(write(tmp_path / "other", LLAMA | changed, random_tensors(LLAMA)))


FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_oss", "sliding_window": 0}, "expected a sliding_window of at least 1, got 0"),
        ({"model_type": "gpt_oss", "partial_rotary_factor": 0.5}, "expected partial_rotary_factor 1.0, got 0.5"),
        ({"model_type": "gemma4_text", "final_logit_softcapping": 0.0}, "expected final_logit_softcapping above 0"),
        (
            {
                "model_type": "gemma4_text",
                "rope_parameters": {"sliding_attention": LOCAL, "full_attention": FULL | {"factor": 8.0}},
            },
            "expected factor 1.0, got 8.0",
        ),
    ],
)
def test_what_other_families_ask_for_is_refused(config, message):
    more = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0} if "gemma4" in config["model_type"] else {}
    with pytest.raises(ValueError, match=message):
        outline(more | config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({"eos_token": {"a": 1}}, "expected eos_token"),
        ({"eos_token": 2}, "2"),
    ],
)
def test_an_end_token_is_a_string_or_an_object_with_one(settings, message):
    assert end_token({"eos_token": {"content": "</s>"}}) == end_token({"eos_token": "</s>"}) == "</s>"
    assert end_token({}) is None
    with pytest.raises(ValueError, match=message):
        end_token(settings)


def test_folders_without_safetensors_are_refused(tmp_path, llama):
    with pytest.raises(ValueError, match="nowhere: expected a folder with a config.json"):
        load_pretrained(tmp_path / "nowhere")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match="expected the file model.safetensors; fetch it, or, where .* another format"):
        load_pretrained(llama)


def test_a_shard_that_is_missing_or_doubled_is_refused(tmp_path):
    folder = write(tmp_path / "llama", LLAMA, random_tensors(LLAMA), shards=3)
    second, third = folder / "model-00002-of-00003.safetensors", folder / "model-00003-of-00003.safetensors"
    kept = load_file(second)
    save_file(kept | load_file(third), second)
    with pytest.raises(ValueError, match=r"expected each tensor in one shard, .*model\.\S+ is in two"):
        load_pretrained(folder)
    second.unlink()
    with pytest.raises(ValueError, match="expected the file model-00002-of-00003.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json: expected JSON"),
        ("config.json", b"[]", "config.json: expected a JSON object, got list"),
        ("model.safetensors", b"", "model.safetensors: expected a whole safetensors file"),
        ("model.safetensors", b"\xff" * 64, "model.safetensors: expected a whole safetensors file"),
        ("model.safetensors.index.json", b"{}", "index.json: expected a weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "index.json: expected a weight_map"),
    ],
)
def test_a_damaged_file_is_named(llama, name, content, message):
    (llama / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_pretrained(llama)


def test_a_shard_that_was_cut_is_named(llama):
    shard = llama / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        load_pretrained(llama)


def test_on_a_mesh_parameters_lie_where_the_rules_say(llama):
    mesh = make_mesh(1, 1, 1)
    _, params = load_pretrained(llama, mesh)
    _, want = load_pretrained(llama)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    assert {x.sharding.mesh for x in jax.tree.leaves(params)} == {mesh}
    assert params["layers"]["q"].sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)


def test_an_array_is_filled_in_any_order():
    pieces = {(i, j): np.full(2, 3 * i + j, np.float32) for i in range(2) for j in range(3)}
    got = fill((2, 3, 2), np.dtype("float32"), reversed(pieces.items()), None)
    np.testing.assert_array_equal(got, np.arange(6, dtype=np.float32).repeat(2).reshape(2, 3, 2))


def test_a_checkpoint_of_the_hub_is_fetched_and_read(monkeypatch, llama):
    import huggingface_hub

    asked = []

    def snapshot(name, **options):
        asked.append((name, options))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config, _ = load_pretrained("hf://owner/name")
    assert config.source == "hf://owner/name" and asked[0][0] == "owner/name"
    assert "*.safetensors" in asked[0][1]["allow_patterns"]
    with pytest.raises(ValueError, match="expected hf://owner/name, got hf://owner"):
        load_pretrained("hf://owner")


def test_without_a_network_the_message_says_what_to_do(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(name, **options):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match="hf://a/b: .* no connection; where there is no network, copy .* folder here"):
        hub.fetch("hf://a/b")


def test_the_table_asks_for_what_a_checkpoint_has(llama):
    header = (llama / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    stored = json.loads(header[8 : 8 + length])
    del stored["__metadata__"]
    assert {name: tuple(each["shape"]) for name, each in stored.items()} == shapes(LLAMA)
    _, params = load_pretrained(llama)
    assert sum(math.prod(shape) for shape in shapes(LLAMA).values()) == sum(x.size for x in jax.tree.leaves(params))
