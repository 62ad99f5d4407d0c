"""GGUF files: the order of rotary rows, the tokenizer, and, where the package is, a file of its writing."""

import json

import jax
import numpy as np
import pytest
from checkpoints import LLAMA, random_tensors, write
from tokenizers import Tokenizer

from searchrl_jax.models.hf import load_pretrained
from searchrl_jax.models.hf.gguf_file import _rotary_halves, read_gguf
from searchrl_jax.models.hf.gguf_tokenizer import tokenizer_files

# The first two tokens of the alphabet's own, then pieces that merges make.
TOKENS = ["<|end|>", "<|im_start|>", "<think>", "Ġ", "1", "2", "a", "b", "Ġa", "ab", "12"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["Ġ a", "a b", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def interleaved(weights, heads):
    """Rows as llama.cpp stores them: of each head, 0, H/2, 1, H/2 + 1, ..."""
    size = len(weights) // heads
    order = [n * size + i // 2 + (i % 2) * size // 2 for n in range(heads) for i in range(size)]
    return weights[order]


def test_a_file_that_is_none_is_named(tmp_path):
    pytest.importorskip("gguf", reason="make pretrained installs it")
    (tmp_path / "a.gguf").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"a\.gguf: expected a whole .gguf file, but .*; fetch it anew"):
        read_gguf(tmp_path / "a.gguf")


def test_rotary_rows_come_back_in_order():
    weights = np.arange(48.0).reshape(24, 2)
    np.testing.assert_array_equal(_rotary_halves(interleaved(weights, 3), 3), weights)


def test_the_tokenizer_is_that_of_the_metadata():
    files = tokenizer_files(METADATA.get, 512)
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"]())
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    # Digits stand alone, though a merge is there for them; control tokens are found whole, and left out of text.
    assert tokenizer.encode("ab a12<|im_start|><think>").tokens == ["ab", "Ġa", "1", "2", "<|im_start|>", "<think>"]
    assert tokenizer.decode([9, 8, 1, 2]) == "ab a<think>"
    assert json.loads(files["tokenizer_config.json"]()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
    }
    assert files["chat_template.jinja"]() == b"{{ messages }}"
    qwen2 = METADATA | {"tokenizer.ggml.pre": "qwen2"}
    tokenizer = Tokenizer.from_buffer(tokenizer_files(qwen2.get, 512)["tokenizer.json"]())
    assert tokenizer.encode("ab a").tokens == ["ab", "Ġa"]


@pytest.mark.parametrize("changed", [{"tokenizer.ggml.pre": "tekken"}, {"tokenizer.ggml.model": "llama"}])
def test_another_tokenizer_is_refused(changed):
    files = tokenizer_files((METADATA | changed).get, 512)
    with pytest.raises(ValueError, match="expected a tokenizer of kind gpt2 that splits like one of smollm, qwen2"):
        files["tokenizer.json"]()


def test_the_error_for_a_file_that_is_not_there_names_a_model_that_is():
    with pytest.raises(ValueError, match="none.gguf: expected a .gguf file, found none; `make pretrained` installs"):
        load_pretrained("none.gguf")


@pytest.mark.peers
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_has_the_weights_of_the_checkpoint_it_was_made_from(tmp_path, family):
    gguf = pytest.importorskip("gguf", reason="writes the file: make pretrained")
    config = LLAMA | {"model_type": family, "vocab_size": len(TOKENS)}
    tensors = random_tensors(config)
    file = gguf.GGUFWriter(tmp_path / "model.gguf", family)
    file.add_block_count(2)
    file.add_context_length(64)
    file.add_embedding_length(24)
    file.add_feed_forward_length(40)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_key_length(8)
    file.add_rope_freq_base(5000.0)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(TOKENS)
    architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, 2)
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if family == "llama" and kind in ("q_proj", "k_proj"):
            tensor = interleaved(tensor, {"q_proj": 4, "k_proj": 2}[kind])
        file.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    found, params = load_pretrained(tmp_path / "model.gguf")
    config["dtype"] = "float32"
    want_config, want = load_pretrained(write(tmp_path / "original", config, tensors))
    assert found == want_config
    jax.tree.map(np.testing.assert_array_equal, params, want)
