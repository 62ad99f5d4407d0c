"""The tokenizer: exact round trips, stable pieces of names, and control tokens that no text can spell."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from searchrl_jax.text.hermes import call_scaffolds
from searchrl_jax.text.tokenizer import CONTROL_TOKENS, ROLE_HEADERS, Tokenizer, train_tokenizer

SCAFFOLDS = call_scaffolds(["bm25_search", "vector_search"])
TEXTS = [
    "numpy.linalg.norm returns a matrix norm. See numpy.linalg.det scipy.linalg.norm numpy.polyfit",
    "numpy.polyfit: Least squares polynomial fit. See numpy.polyval numpy.poly1d [1] [2] [10]",
    "the user\nof the tool\nasks the assistant\nfor a system\n <|im_start|> <tool_call> |im_end| tool_response",
] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 600, SCAFFOLDS)


def random_texts(seed, count):
    """Texts over all planes of Unicode (without surrogates), salted with what is special here."""
    rng = np.random.default_rng(seed)
    special = [
        *CONTROL_TOKENS,
        *ROLE_HEADERS,
        *SCAFFOLDS,
        " ",
        "  ",
        "\n",
        "\x00",
        "e\u0301",
        "\u200d",
        "numpy.linalg.norm",
    ]
    for _ in range(count):
        parts = []
        for _ in range(rng.integers(1, 12)):
            kind = rng.integers(4)
            if kind == 0:
                parts.append(special[rng.integers(len(special))])
            elif kind == 1:
                parts.append("".join(chr(c) for c in rng.integers(0, 128, rng.integers(1, 8))))
            elif kind == 2:
                parts.append("".join(chr(c) for c in rng.integers(0, 0xD800, rng.integers(1, 6))))
            else:
                parts.append("".join(chr(c) for c in rng.integers(0xE000, 0x110000, rng.integers(1, 6))))
        yield "".join(parts)


def test_any_text_round_trips(tokenizer):
    for text in [
        "",
        "\x00",
        "a\x00b",
        "naïve 😀 日本語 \u0301\u0301",
        "\r\n\t  x  ",
        "\u2028\ufeff",
        *random_texts(0, 400),
    ]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()


def test_lone_surrogates_are_refused_clearly(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate.*at 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        train_tokenizer(["\udfff"], 600, SCAFFOLDS)


def test_rare_characters_are_single_pieces_where_they_are_asked_for():
    rare = ["≥", "∞", "é"]
    learned = train_tokenizer(TEXTS, 600, SCAFFOLDS, rare)
    plain = train_tokenizer(TEXTS, 600, SCAFFOLDS)
    for character in rare:
        assert len(learned.encode(character)) == 1 < len(plain.encode(character))
        assert learned.decode(learned.encode(f"(C{character} smooth)")) == f"(C{character} smooth)"


def test_a_dotted_name_is_the_same_pieces_wherever_it_stands(tokenizer):
    name = tokenizer.encode(" numpy.linalg.matrix_rank2")
    around = [
        ("[1]", ":"), ("See", " numpy.polyval"), ("x", "."), ("\n", "\n"), ('"', '"}}'), (SCAFFOLDS[0], '"}}'), 
        ("(", ")"), (" ", ""), (",", ","), ("", " \n"),
    ]  # fmt: skip
    for before, after in around:
        ids = tokenizer.encode(f"{before} numpy.linalg.matrix_rank2{after}")
        assert any(ids[i : i + len(name)] == name for i in range(len(ids))), (before, after)


def test_frequent_names_are_learned_whole_and_numbers_stay_short():
    texts = ["See numpy.linalg.norm 123456789 x2.y3 a, numpy.linalg.norm"] * 50
    learned = train_tokenizer(texts, 500, SCAFFOLDS)
    assert len(learned.encode(" numpy.linalg.norm")) == 1
    assert [learned.decode([id_]) for id_ in learned.encode(" 123456789")] == [" 12", "34", "56", "78", "9"]
    pieces = [learned.decode_bytes([id_]) for id_ in range(learned.vocab_size)]
    assert not [piece for piece in pieces if sum(48 <= byte < 58 for byte in piece) > 2]
    assert learned.encode(", numpy.linalg.norm")[-1:] == learned.encode(" numpy.linalg.norm")


def test_no_text_encodes_to_a_control_token_or_role_header(tokenizer):
    reserved = {*tokenizer.control_ids.values(), *tokenizer.header_ids.values()}
    assert len(reserved) == len(CONTROL_TOKENS) + len(ROLE_HEADERS)
    texts = []
    for control in (*CONTROL_TOKENS, *ROLE_HEADERS):
        texts += [control, control * 3, f"x{control}y", f" {control} "]
        texts += [control[:cut] + control + control[cut:] for cut in range(len(control))]  # nested
        texts += [
            control[:cut] + "\u200b" + control[cut:] for cut in range(len(control))
        ]  # split by a zero-width space
        texts += [
            control.replace("|", "\uff5c").replace("<", "\uff1c"),
            control.replace("_", "\u2581"),
            control.upper(),
        ]
        texts += [a + control for a in CONTROL_TOKENS]
    for text in [*texts, *random_texts(1, 300)]:
        ids = tokenizer.encode(text)
        assert reserved.isdisjoint(ids), text
        assert tokenizer.decode(ids) == text


def test_a_loaded_tokenizer_is_the_saved_one_and_as_safe(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert [loaded.vocab_size, loaded.pad_id] == [tokenizer.vocab_size, tokenizer.pad_id]
    assert loaded.control_ids == tokenizer.control_ids
    assert loaded.header_ids == tokenizer.header_ids
    assert loaded.scaffold_ids == tokenizer.scaffold_ids
    for text in ["<|im_end|>", *CONTROL_TOKENS, *SCAFFOLDS, *random_texts(2, 100)]:
        assert loaded.encode(text) == tokenizer.encode(text)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_controls_and_scaffolds_are_single_ids_that_decode_to_their_text(tokenizer):
    assert set(tokenizer.control_ids) == set(CONTROL_TOKENS)
    assert set(tokenizer.scaffold_ids) == set(SCAFFOLDS)
    for text, id_ in {**tokenizer.control_ids, **tokenizer.header_ids, **tokenizer.scaffold_ids}.items():
        assert tokenizer.decode([id_]) == text
    for text, id_ in tokenizer.scaffold_ids.items():
        assert tokenizer.encode(text) == [id_]
    assert tokenizer.pad_id == tokenizer.control_ids["<|pad|>"]


def test_every_id_has_bytes_and_others_are_refused(tokenizer):
    assert tokenizer.vocab_size <= 600
    assert all(tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size))
    assert len({tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size)}) == tokenizer.vocab_size
    for id_ in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="expected ids in"):
            tokenizer.decode([id_])


def test_half_a_character_decodes_to_the_replacement_character(tokenizer):
    first = next(id_ for id_ in range(tokenizer.vocab_size) if tokenizer.decode_bytes([id_]) == b"\xe6")
    assert tokenizer.decode([first]) == "\ufffd"


def test_training_is_deterministic_across_processes_hash_seeds_and_threads(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "here.json")
    program = (
        "import sys; from tests_texts import TEXTS, SCAFFOLDS; "
        "from searchrl_jax.text.tokenizer import train_tokenizer; "
        "train_tokenizer(TEXTS, 600, SCAFFOLDS).save(sys.argv[1])"
    )
    (tmp_path / "tests_texts.py").write_text(f"TEXTS = {TEXTS!r}\nSCAFFOLDS = {SCAFFOLDS!r}\n")
    root = next(p for p in sys.path if os.path.isdir(os.path.join(p or ".", "searchrl_jax")))
    for seed, threads in (("1", "1"), ("2", "2")):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "RAYON_NUM_THREADS": threads,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.path.abspath(root or ".")]),
        }
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "there.json")], env=environment, check=True)
        assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


def test_threads_share_one_tokenizer(tokenizer):
    """Fault 26: "Already borrowed" when threads encode at once."""
    texts = list(random_texts(3, 200))
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts * 5)) == expected * 5


def test_bad_training_arguments_are_refused():
    with pytest.raises(ValueError, match="vocab_size >= "):
        train_tokenizer(TEXTS, 100, SCAFFOLDS)
    with pytest.raises(ValueError, match="distinct scaffolds"):
        train_tokenizer(TEXTS, 600, ['"}}', '"}}'])
    for scaffold in ("", "<|im_end|>", "user\n"):
        with pytest.raises(ValueError, match="ordinary text"):
            train_tokenizer(TEXTS, 600, [scaffold])


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_what_stands_between_quotation_marks_has_the_pieces_that_it_has_alone():
    texts = ['Find the function for this: "a stack (row wise)". Or "... of an array (n, m)"?'] * 50
    learned = train_tokenizer(texts, 500, SCAFFOLDS)
    for quoted in ("a stack (row wise)", "... of an array (n, m)", "x'"):
        ids = learned.encode(quoted)
        for after in ('".', '"?', '"', '", or'):
            begin = learned.encode(f'this: "{quoted}{after}')[len(learned.encode('this: "')) :]
            assert begin[: len(ids)] == ids
