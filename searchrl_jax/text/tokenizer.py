"""A byte-level BPE tokenizer whose control tokens no text can spell.

Three kinds of ids:

    control    <|im_start|>, <tool_call>, ...; and the role headers that follow <|im_start|>. Only a dialect writes
    them, by id. scaffold   JSON scaffolding such as '"}}'. `encode` finds them in any text; they are ordinary in every
    other respect. pieces     the 256 bytes and the merges learned from the training texts.

Pre-tokenisation keeps a dotted identifier together with the one space before it, so that " numpy.linalg.norm" is the
same pieces wherever it stands. That is what lets a small policy copy a name from an observation into a query.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
RESPONSE_START = "<tool_response>"
RESPONSE_END = "</tool_response>"

CONTROL_TOKENS = (PAD, TURN_START, TURN_END, CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)
ROLE_HEADERS = ("system\n", "user\n", "assistant\n", "tool\n")

# Alternatives in order: a dotted identifier, at most two digits (references stay short and few), a quotation mark (in a
# run of punctuation it would change the last token of what it encloses), a run of other punctuation, white space that
# leaves the last space to the word after it. Every character falls under one of them.
_PIECES = (
    r" ?[\p{L}_][\p{L}\p{M}\p{N}_]*(?:\.[\p{L}_][\p{L}\p{M}\p{N}_]*)*"
    r"| ?\p{N}{1,2}"
    r'| ?"'
    r'| ?[^\s\p{L}\p{N}_"]+'
    r"|\s+(?!\S)"
    r"|\s+"
)


class Tokenizer:
    """Byte-level BPE over a `tokenizers.Tokenizer`; immutable, so that threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wraps a backend made by `train_tokenizer` or read by `load`.

        Raises:
            ValueError: a control token or role header is missing or is not special, or the ids have gaps.
        """
        added = {token.content: (id_, token) for id_, token in backend.get_added_tokens_decoder().items()}
        for text in (*CONTROL_TOKENS, *ROLE_HEADERS):
            if text not in added or not added[text][1].special:
                raise ValueError(f"expected {text!r} as a special token; train the tokenizer with train_tokenizer")
        # The backend does not save this flag. Without it `encode` would turn "<|im_end|>" in a document into the
        # control id.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.control_ids: Mapping[str, int] = MappingProxyType({text: added[text][0] for text in CONTROL_TOKENS})
        self.header_ids: Mapping[str, int] = MappingProxyType({text: added[text][0] for text in ROLE_HEADERS})
        self.scaffold_ids: Mapping[str, int] = MappingProxyType(
            {text: id_ for text, (id_, token) in sorted(added.items()) if not token.special}
        )
        self.pad_id: int = self.control_ids[PAD]
        self._reserved = frozenset(self.control_ids.values()) | frozenset(self.header_ids.values())
        self._bytes = _bytes_of_ids(backend, self.vocab_size, {id_: text for text, (id_, _) in added.items()})

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text: control strings and role headers in it become pieces, never their ids.

        Raises:
            ValueError: `text` holds a lone surrogate, which no byte sequence stands for.
        """
        require_utf8(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        # The promise that documents cannot forge a turn rests on a flag of a third-party library; this line holds it to
        # it.
        if not self._reserved.isdisjoint(ids):
            raise ValueError("the tokenizers library matched a control token inside text; use the tested version range")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens as their strings; bytes that are not UTF-8 come out as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes that `ids` stand for.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise ValueError(
                    f"expected ids in [0, {self.vocab_size}), got {id_}; decode with the tokenizer that encoded"
                )
        return b"".join(self._bytes[id_] for id_ in ids)

    def save(self, path: str | Path) -> None:
        """Writes one JSON file, all that `load` needs."""
        self._backend.save(str(path), pretty=False)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer that `save` wrote.

        Raises:
            ValueError: there is no such file, or it is not one of our tokenizers.
        """
        if not Path(path).is_file():
            raise ValueError(
                f"expected a tokenizer file at {path}, found none; give the path that Tokenizer.save wrote"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception on bad JSON
            raise ValueError(
                f"{path} is not a tokenizer.json: {error}; give the path that Tokenizer.save wrote"
            ) from error
        return cls(backend)


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, scaffolds: Sequence[str], characters: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer learned from `texts`; the same texts in the same order give the same file.

    Args:
        texts: the training side of the corpus only.
        vocab_size: upper bound on the number of ids, control tokens, headers and scaffolds included. Fewer come out
            where the texts are too small to learn so many merges.
        scaffolds: strings that become single tokens wherever they stand in a text.
        characters: which become single pieces, however rare in `texts`. A policy that copies a character byte by byte
            breaks it at times, and a call that holds half a character is no text.

    Raises:
        ValueError: `vocab_size` cannot hold the bytes and the fixed tokens, a scaffold is empty, repeated or holds a
            control token, or a text holds a lone surrogate.
    """
    for scaffold in scaffolds:
        if not scaffold or any(control in scaffold for control in CONTROL_TOKENS) or scaffold in ROLE_HEADERS:
            raise ValueError(
                f"expected scaffolds of ordinary text, got {scaffold!r}; control tokens are added by themselves"
            )
    if len(set(scaffolds)) != len(scaffolds):
        raise ValueError(f"expected distinct scaffolds, got {list(scaffolds)}; name each once")
    least = 256 + len(CONTROL_TOKENS) + len(ROLE_HEADERS) + len(scaffolds)
    if vocab_size < least:
        raise ValueError(f"expected vocab_size >= {least} (256 bytes and the fixed tokens), got {vocab_size}; raise it")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(scaffolds),
        special_tokens=[*CONTROL_TOKENS, *ROLE_HEADERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # As often as there are texts, so that their bytes are among the first to be merged.
    repeated = itertools.chain.from_iterable(itertools.repeat(character, len(texts)) for character in characters)
    backend.train_from_iterator((require_utf8(text) for text in itertools.chain(texts, repeated)), trainer)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in scaffolds])
    return Tokenizer(backend)


def require_utf8(text: str) -> str:
    """`text`.

    Raises:
        ValueError: it holds a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected text that UTF-8 can hold, got a lone surrogate {text[error.start]!r} at {error.start}; "
            "clean the text where it is read"
        ) from error
    return text


def _bytes_of_ids(backend: tokenizers.Tokenizer, vocab_size: int, added: Mapping[int, str]) -> list[bytes]:
    """Bytes per id. A piece is spelled in the byte-level alphabet, an added token in plain text."""
    alphabet = byte_alphabet()
    table = []
    for id_ in range(vocab_size):
        piece = backend.id_to_token(id_)
        if piece is None:
            raise ValueError(
                f"expected ids without gaps up to {vocab_size}, id {id_} is missing; train the tokenizer anew"
            )
        table.append(added[id_].encode("utf-8") if id_ in added else bytes(alphabet[character] for character in piece))
    return table


def byte_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet.

    A printable Latin-1 byte is its own character; the other 68 take the code points from 256 up, in order.

    Source: GPT-2's `bytes_to_unicode`, which `tokenizers.pre_tokenizers.ByteLevel` follows.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
