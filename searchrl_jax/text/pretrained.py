"""The tokenizer of a pretrained model, in whose texts no control token can be spelled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from searchrl_jax.text.tokenizer import byte_alphabet, require_utf8

# What an added token may be for text to become it: Gemma's runs of white space and its HTML tags. All others steer a
# model or may come to do so, whether their file calls them special or not (Qwen's <tool_call> is not).
_ORDINARY = re.compile(
    r"[\s\u2581]+|</?(?:a|b|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup"
    r"|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


class PretrainedTokenizer:
    """A `tokenizer.json`; immutable, so that threads may share it.

    Attributes:
        vocab_size: one more than the highest id; a model's table of embeddings may be longer.
        control_ids: of every added token that text never becomes, by its string.
        header_ids, scaffold_ids: none; a tokenizer trained here has them.
        end_id: of the token that its configuration calls the end of a sequence, if it does.
    """

    def __init__(self, content: str, end_token: str | None = None) -> None:
        """Args:
        content: of the file.
        end_token: ends a sequence.

        Raises:
            ValueError: it is no tokenizer, or one whose tokens don't stand for bytes.
        """
        try:
            file: dict[str, Any] = json.loads(content)
            added: list[dict[str, Any]] = file["added_tokens"]
            decoder = json.dumps(file["decoder"])
            for token in added:
                token["special"] = token["special"] or not _ORDINARY.fullmatch(token["content"])
            # A file may keep the settings of whoever saved it last, and with them cut prompts short in silence.
            backend = tokenizers.Tokenizer.from_str(json.dumps(file | {"truncation": None, "padding": None}))
        except Exception as error:  # the library raises bare Exception on bad JSON
            raise ValueError(f"expected the content of a tokenizer.json: {error}; give a model's own file") from error
        # Not a part of the file: with it no token that is special, as all control tokens are now, is found in a text.
        backend.encode_special_tokens = True
        self._backend = backend
        control = {token["content"]: token["id"] for token in added if token["special"]}
        self.control_ids: Mapping[str, int] = MappingProxyType(control)
        self.header_ids: Mapping[str, int] = MappingProxyType({})
        self.scaffold_ids: Mapping[str, int] = MappingProxyType({})
        if end_token is not None and end_token not in control:
            raise ValueError(f"expected the end token {end_token!r} among the added tokens; correct its configuration")
        self.end_id: int | None = None if end_token is None else control[end_token]
        self._controls = frozenset(control.values())
        self._bytes = _bytes_of_ids(backend.get_vocab(with_added_tokens=True), added, decoder)
        self.vocab_size: int = max(self._bytes) + 1

    @classmethod
    def load(cls, path: str | Path) -> PretrainedTokenizer:
        """The tokenizer in a model's folder: `tokenizer.json` and, for the end token, `tokenizer_config.json`.

        Raises:
            ValueError: there is none.
        """
        file = Path(path) / TOKENIZER
        if not file.is_file():
            raise ValueError(f"expected a {TOKENIZER} in {path}, found none; give a folder in Hugging Face format")
        settings = Path(path) / TOKENIZER_CONFIG
        end = end_token(json.loads(settings.read_text(encoding="utf-8"))) if settings.is_file() else None
        return cls(file.read_text(encoding="utf-8"), end)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text: control strings in it become pieces, never their ids.

        Raises:
            ValueError: `text` holds a lone surrogate, which no byte sequence stands for.
        """
        ids: list[int] = self._backend.encode(require_utf8(text), add_special_tokens=False).ids
        # The promise that documents cannot forge a turn rests on a flag of a third-party library and on the file's
        # merges; this line holds them to it.
        if not self._controls.isdisjoint(ids):
            raise ValueError("the tokenizer made a control token of text; use the tested version range and model files")
        return ids

    def knows(self, id_: int) -> bool:
        """Whether a token has this id: a model can sample others, since its table of embeddings is padded."""
        return id_ in self._bytes

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens as their strings; what is no UTF-8, or no token, comes out as U+FFFD."""
        return b"".join(self._bytes.get(id_, _UNKNOWN) for id_ in ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes that `ids` stand for.

        Raises:
            ValueError: no token has one of these ids.
        """
        for id_ in ids:
            if not self.knows(id_):
                raise ValueError(f"expected ids of tokens, got {id_}; decode with the tokenizer that encoded")
        return b"".join(self._bytes[id_] for id_ in ids)


def end_token(settings: Any) -> str | None:
    """The string of the token that a tokenizer_config.json calls the end of a sequence, if it does.

    Raises:
        ValueError: it is no object, or names the token in another way than transformers does.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"expected a JSON object, got {type(settings).__name__}")
    end = settings.get("eos_token")
    end = end.get("content", end) if isinstance(end, dict) else end
    if end is not None and not isinstance(end, str):
        raise ValueError(f"expected eos_token to be a string or an object with its content, got {end!r}")
    return end


def _bytes_of_ids(vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], decoder: str) -> dict[int, bytes]:
    """Bytes of each id: by the byte-level alphabet, or with U+2581 for the space and <0x0A> for a byte."""
    plain = {token["id"]: token["content"].encode("utf-8") for token in added}
    if '"ByteLevel"' in decoder:
        alphabet = byte_alphabet()
        return {id_: bytes(alphabet[c] for c in piece) for piece, id_ in vocabulary.items() if id_ not in plain} | plain
    if '"ByteFallback"' not in decoder:
        raise ValueError(f"expected a byte-level tokenizer or one that falls back on bytes, got the decoder {decoder}")
    table = {}
    for piece, id_ in vocabulary.items():
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        table[id_] = bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode("utf-8")
    return table | {token["id"]: plain[token["id"]] for token in added if token["special"]}
