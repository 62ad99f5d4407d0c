"""Tokenizer files of pretrained models: exact bytes, and control tokens that no text can spell."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from official import FAMILIES, WORDS, stand_in

from searchrl_jax.text.pretrained import PretrainedTokenizer


@pytest.fixture(params=[*FAMILIES, "plain"])
def family(request):
    return request.param


@pytest.fixture
def tokenizer(family):
    return stand_in(family)[1]


def test_text_round_trips_and_no_text_becomes_a_control_token(tokenizer):
    controls = set(tokenizer.control_ids.values())
    assert controls
    texts = [
        "",
        "\x00",
        "a\x00b",
        "\r\n\t x ",
        *tokenizer.control_ids,
        *(word for word in WORDS if "\u0301" not in word),
    ]
    for text in texts:
        for written in (text, f"a{text}{text} b", text[:-1]):
            ids = tokenizer.encode(written)
            assert controls.isdisjoint(ids), written
            assert tokenizer.decode(ids) == written
            assert tokenizer.decode_bytes(ids) == written.encode()


def test_ordinary_text_has_the_ids_of_the_file(family, tokenizer):
    backend = stand_in(family)[0]
    text = " ".join(WORDS)
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_tag_that_the_file_does_not_call_special_is_still_a_control_token():
    backend, tokenizer = stand_in("qwen3")
    assert backend.encode("<tool_call>").ids == [tokenizer.control_ids["<tool_call>"]]
    assert len(tokenizer.encode("<tool_call>")) > 1
    assert not backend.get_added_tokens_decoder()[tokenizer.control_ids["<tool_call>"]].special


def test_white_space_and_tags_of_hypertext_stay_the_tokens_that_they_are():
    file = json.loads(stand_in("plain")[0].to_str())
    first = max(token["id"] for token in file["added_tokens"]) + 1
    for number, content in enumerate(("\n\n\n\n\n", "</h1>", "<think>", "<unused7>", "[multimodal]", "<s>")):
        token = {"id": first + number, "content": content, "special": content == "<s>", "normalized": False}
        file["added_tokens"].append(token | {"single_word": False, "lstrip": False, "rstrip": False})
    tokenizer = PretrainedTokenizer(json.dumps(file))
    assert tokenizer.encode("a\n\n\n\n\n</h1>")[1:] == [first, first + 1]
    assert set(tokenizer.control_ids) == {
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<think>",
        "<unused7>",
        "[multimodal]",
        "<s>",
    }
    assert set(tokenizer.control_ids.values()).isdisjoint(tokenizer.encode("<think><unused7>[multimodal]<s>"))


def test_a_length_that_a_file_was_saved_with_cuts_nothing():
    """Fault 10: left-truncation that a tokenizer was saved with silently cut prompts."""
    file = json.loads(stand_in("plain")[0].to_str())
    file["truncation"] = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert len(PretrainedTokenizer(json.dumps(file)).encode("0123456789")) == 10


def test_ids_of_no_token_are_told_from_others(tokenizer):
    for id_ in (-1, tokenizer.vocab_size, tokenizer.vocab_size + 200):
        assert not tokenizer.knows(id_)
        assert tokenizer.decode([id_]) == "\ufffd"
        with pytest.raises(ValueError, match="expected ids of tokens"):
            tokenizer.decode_bytes([id_])
    assert all(tokenizer.knows(id_) for id_ in range(tokenizer.vocab_size))


def test_lone_surrogates_are_refused_clearly(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


def test_threads_share_one_tokenizer(tokenizer):
    """Fault 26: "Already borrowed" when threads encode at once."""
    texts = [word * count for word in WORDS for count in (1, 5)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts * 5)) == expected * 5


@pytest.mark.parametrize("end", ["<|endoftext|>", {"content": "<|endoftext|>"}, None])
def test_a_folder_is_loaded_with_its_end_token(tmp_path, end):
    backend = stand_in("plain")[0]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    loaded = PretrainedTokenizer.load(tmp_path)
    assert loaded.end_id == (None if end is None else backend.token_to_id("<|endoftext|>"))
    assert loaded.encode("the thing") == stand_in("plain")[1].encode("the thing")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        PretrainedTokenizer.load(tmp_path)
    for content in ("", "{}", "[1]", '{"added_tokens": [], "decoder": null}'):
        with pytest.raises(ValueError, match="expected the content of a tokenizer.json"):
            PretrainedTokenizer(content)
    file = json.loads(stand_in("plain")[0].to_str())
    with pytest.raises(ValueError, match="expected a byte-level tokenizer"):
        PretrainedTokenizer(json.dumps(file | {"decoder": None}))
    with pytest.raises(ValueError, match="expected the end token '</s>'"):
        PretrainedTokenizer(json.dumps(file), "</s>")
