"""The tokenizer inside a GGUF file, as the files of a Hugging Face tokenizer."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# llama.cpp's kinds of tokens: control tokens are special, user-defined ones are matched whole in any text.
_CONTROL, _USER_DEFINED = 3, 4

_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(field: Callable[[str], Any], max_length: int) -> Mapping[str, Callable[[], bytes]]:
    """Contents of tokenizer.json, tokenizer_config.json and, where the file has a template, chat_template.jinja.

    Args:
        field: the file's metadata by name; None for what it lacks.
        max_length: tokens that the model was trained for.
    """
    files = {
        "tokenizer.json": lambda: build_tokenizer(field).to_str(pretty=False).encode(),
        "tokenizer_config.json": lambda: json.dumps(_config(field, max_length), indent=2).encode(),
    }
    if template := field("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode
    return files


def build_tokenizer(field: Callable[[str], Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes.

    Raises:
        ValueError: it's of another kind, or splits text in a way that isn't known here.
    """
    kind, split = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "smollm")
    before = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "qwen2": pre_tokenizers.Split(Regex(_QWEN2_PIECES), "isolated"),
    }
    if kind != "gpt2" or split not in before:
        raise ValueError(
            f"expected a tokenizer of kind gpt2 that splits like one of {', '.join(before)}, got {kind} and {split}; "
            "give the original checkpoint's folder, which holds its tokenizer"
        )
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before[split], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _config(field: Callable[[str], Any], max_length: int) -> dict[str, Any]:
    tokens = field("tokenizer.ggml.tokens")
    ids = {
        "bos_token": field("tokenizer.ggml.bos_token_id"),
        "eos_token": field("tokenizer.ggml.eos_token_id"),
        "unk_token": field("tokenizer.ggml.unknown_token_id"),
        "pad_token": field("tokenizer.ggml.padding_token_id"),
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[id_] for name, id_ in ids.items() if id_ is not None},
    }
