"""Ids of every dialect equal those of its family's template and tokenizer. `make peers-text` fetches these."""

import pytest
from official import (
    FAMILIES,
    TOOLS,
    answer_text,
    conversation,
    follow_up_of,
    ids_of,
    messages_of,
    missing,
    normal,
    official_tokenizer,
    render,
    spans_of,
)

from searchrl_jax.text.calls import Call
from searchrl_jax.text.dialect import build_dialect

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"{', '.join(missing())} not found: make peers-text fetches it"),
]

CONVERSATIONS = 200


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backend(family):
    return official_tokenizer(family)[0]


@pytest.fixture(scope="module")
def dialect(family):
    return build_dialect(family, official_tokenizer(family)[1], TOOLS)


def test_appended_ids_are_those_of_the_whole_render(family, backend, dialect):
    """Before every turn: the text is the template's, and the ids of what was not sampled are those of its text.

    Where a thought is there to keep the line break before it apart from the one after it, so are all ids.
    """
    num_whole = 0
    for seed in range(CONVERSATIONS):
        talk = conversation(seed)
        for count in range(len(talk.exchanges) + 1):
            spans = spans_of(dialect, talk, count)
            text = render(family, messages_of(family, talk, count))
            assert dialect.tokenizer.decode(ids_of(spans)) == text, seed
            for is_sampled, ids in spans:
                if not is_sampled:
                    words = dialect.tokenizer.decode(ids)
                    assert ids == backend.encode(words, add_special_tokens=False).ids, seed
        if family != "qwen3_6" or talk.always_thinks:
            num_whole += 1
            assert ids_of(spans) == backend.encode(text, add_special_tokens=False).ids, seed
    assert num_whole >= CONVERSATIONS // 4


def test_a_further_question_is_the_whole_render_too(family, backend, dialect):
    """Fault 3: where the template drops thoughts the row is no extension, and it never differs silently."""
    num_new_rows = 0
    for seed in range(CONVERSATIONS):
        talk = conversation(seed)
        answer = backend.encode(normal(family, answer_text(family, talk)), add_special_tokens=False).ids
        row = ids_of(spans_of(dialect, talk, len(talk.exchanges))) + answer
        ids = dialect.render_follow_up(row, talk.next_question)
        text = render(family, follow_up_of(family, talk))
        assert dialect.tokenizer.decode(ids) == text, seed
        assert ids == backend.encode(text, add_special_tokens=False).ids, seed
        num_new_rows += ids[: len(row)] != row
    assert num_new_rows > CONVERSATIONS // 2


def test_calls_are_read_back(family, dialect):
    for seed in range(CONVERSATIONS):
        for exchange in conversation(seed).exchanges:
            call, arguments = (
                dialect.parse(dialect.render_call(exchange.call, exchange.thinking)),
                exchange.call.arguments,
            )
            if "query" in arguments:
                arguments = {"query": normal(family, arguments["query"])}
            assert call == Call(exchange.call.name, arguments)


def test_no_text_becomes_a_control_token(dialect):
    tokenizer = dialect.tokenizer
    controls = set(tokenizer.control_ids.values())
    assert len(controls) > 20
    for text in tokenizer.control_ids:
        ids = tokenizer.encode(f"{text} a{text}{text}b {text[:-1]}")
        assert controls.isdisjoint(ids), text
        assert tokenizer.decode(ids) == f"{text} a{text}{text}b {text[:-1]}"
