"""SmolLM2-135M-Instruct, a real model out of a package: it says here what it says in transformers, bit for bit saved.

Takes minutes and what `make pretrained` installs, with torch beside it; skipped where that is missing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.models.cache import init_cache, init_stage, write_rows
from searchrl_jax.models.decoder import append, decode_step, forward, unembed
from searchrl_jax.models.hf import load_pretrained, save_pretrained
from searchrl_jax.models.hf.smollm2 import smollm2_path

pytestmark = [pytest.mark.peers, pytest.mark.slow]

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits.",
    "What is 12 + 30?",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "Write a haiku about rain.",
    "What does a compiler do?",
    "How do I boil an egg?",
    "Translate 'good morning' into French.",
    "What is a prime number?",
    "Give me a fact about octopuses.",
    "What year did World War II end?",
    "List the planets.",
    "What is photosynthesis?",
    "Sum up the plot of Romeo and Juliet in one sentence.",
    "Which is larger, 0.9 or 0.11?",
    "How far away is the moon?",
    "What is BM25?",
    "Say hello.",
)
TEXTS = (
    "It cost $1,234.50 in 2019!",
    "  def f(x):\n\treturn x ** 2\n",
    "naïve 北京 🙂 <|im_end|> <|fim|>",
    "don't I'LL 100",
)
NEW, END = 64, 2


@pytest.fixture(scope="module")
def path():
    try:
        found = smollm2_path()
    except ValueError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf", reason="gguf reads SmolLM2: make pretrained")
    return found


@pytest.fixture(scope="module")
def loaded(path):
    return load_pretrained(path)


@pytest.fixture(scope="module")
def saved(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "saved"
    save_pretrained(folder, *loaded)
    return folder


@pytest.fixture(scope="module")
def theirs(path):
    """transformers' model and tokenizer, out of the same GGUF file."""
    pytest.importorskip("torch", reason="the reference runs in torch: make reference")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def prompts(theirs):
    def ids(question):
        return theirs[1].apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)

    return [list(ids(question)["input_ids"]) for question in QUESTIONS]


def test_saved_and_loaded_again_every_bit_is_the_same(loaded, saved):
    config, params = load_pretrained(saved)
    assert config == loaded[0]
    jax.tree.map(np.testing.assert_array_equal, params, loaded[1])


def test_the_saved_folder_loads_in_transformers(theirs, saved):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    want = theirs[0].state_dict()
    assert state.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(state[name].numpy(), want[name].numpy(), err_msg=name)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    for text in (*QUESTIONS, *TEXTS):
        ids = tokenizer(text)["input_ids"]
        assert ids == theirs[1](text)["input_ids"] and tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "Paris"}]
    assert tokenizer.apply_chat_template(messages) == theirs[1].apply_chat_template(messages)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, END)


def test_logits_equal_those_of_transformers(loaded, theirs, prompts):
    import torch

    config, params = loaded
    width = max(map(len, prompts))
    tokens = np.array([ids + [0] * (width - len(ids)) for ids in prompts])
    segments = np.array([[1] * len(ids) + [0] * (width - len(ids)) for ids in prompts])
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    got = np.array(jax.jit(lambda p: unembed(config, p, forward(config, p, tokens, positions, segments)))(params))
    worst = 0.0
    for row, ids in enumerate(prompts):
        with torch.no_grad():
            want = theirs[0](torch.tensor([ids])).logits[0].numpy()
        worst = max(worst, float(np.abs(got[row, : len(ids)] - want).max() / np.abs(want).max()))
        np.testing.assert_array_equal(got[row, : len(ids)].argmax(-1), want.argmax(-1))
    print(f"largest difference of logits: {worst:.1e} of their scale")
    assert worst < 2e-4


def test_greedy_generations_are_identical(loaded, theirs, prompts):
    import torch

    model, _ = theirs
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.no_grad():
        out = model.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=END)
    ours, ended = greedy(*loaded, prompts), 0
    for want, got in zip(out[:, width:].tolist(), ours, strict=True):
        length = want.index(END) + 1 if END in want else NEW
        ended += length < NEW
        assert got[:length] == want[:length]
    print(f"{len(prompts)} generations are the same; {ended} of them end before {NEW} tokens")


def greedy(config, params, prompts):
    """The next `NEW` tokens of each prompt, past the end of turn too."""
    rows, width = len(prompts), max(map(len, prompts))
    tokens = np.array([ids + [0] * (width - len(ids)) for ids in prompts])
    lengths = jnp.array([len(ids) for ids in prompts])
    cache = init_cache(config, rows, width)
    hidden, entries = jax.jit(functools.partial(append, config))(params, cache, tokens, lengths)
    cache = jax.jit(write_rows)(cache, entries, lengths, jnp.arange(rows))
    logits = unembed(config, params, hidden[jnp.arange(rows), lengths - 1])
    step = jax.jit(functools.partial(decode_step, config))
    stage, found = init_stage(cache, NEW), []
    for number in range(NEW):
        found.append(jnp.argmax(logits, -1))
        logits, stage = step(params, cache, stage, jnp.int32(number), found[-1], jnp.ones(rows, bool))
    return np.array(found).T.tolist()
