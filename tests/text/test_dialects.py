"""Every dialect: the recorded ids of its family's template, attacks by control tokens, and strict parsers."""

import json
import random

import numpy as np
import pytest
from official import (
    CONTROLS,
    FAMILIES,
    RECORDED,
    SEEDS,
    TOOLS,
    answer_text,
    conversation,
    digest,
    ids_of,
    normal,
    spans_of,
    stand_in,
    stand_in_dialect,
)

from searchrl_jax.env import Limits
from searchrl_jax.env.demonstrator import Demonstrator
from searchrl_jax.testing.tiny import tiny_documents, tiny_env, tiny_tasks
from searchrl_jax.text.calls import MALFORMED_TEXT, Call, Malformed
from searchrl_jax.text.dialect import PRETRAINED, build_dialect
from searchrl_jax.text.hermes import HermesDialect
from searchrl_jax.text.tokenizer import train_tokenizer

NAMES = (*FAMILIES, "plain")
SEARCH = Call("bm25_search", {"query": "polyfit  'x'"})
SUBMIT = Call("submit", {"ranking": [3, 1]})


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def dialect(name):
    return stand_in_dialect(name)


def sampled(name, text):
    """Ids of a turn as a policy may sample it: control strings are control tokens."""
    return stand_in(name)[0].encode(text, add_special_tokens=False).ids


def spelled(name, text):
    """Ids of `text` as ordinary text, one character at a time."""
    return [id_ for character in text for id_ in stand_in(name)[1].encode(character)]


# ---------------------------------------------------------------- as the template writes them


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_recorded_of_the_template(family):
    """`python tests/text/official.py` says how they were recorded, and `test_official_dialects.py` goes further."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    dialect = stand_in_dialect(family)
    num_ids = 0
    for seed in SEEDS:
        talk = conversation(seed)
        rows = [ids_of(spans_of(dialect, talk, count)) for count in range(len(talk.exchanges) + 1)]
        answer = sampled(family, normal(family, answer_text(family, talk)))
        rows.append(dialect.render_follow_up([*rows[-1], *answer], talk.next_question))
        for count, (row, (text, ids)) in enumerate(zip(rows, recorded[f"{family} {seed}"], strict=True)):
            assert digest(dialect.tokenizer.decode(row)) == text, (seed, count)
            # Line breaks around an empty thought are one token to the template; to the policy the first one is given.
            if family != "qwen3_6" or all(e.thinking for e in talk.exchanges[:count]) or count > len(talk.exchanges):
                assert digest(row) == ids, (seed, count)
                num_ids += 1
    assert num_ids > len(SEEDS)


def test_sampled_ids_are_appended_as_they_were(name, dialect):
    """Fault 1: ids that no encoder would choose stay, and are read as the same call."""
    turn = dialect.render_call(SEARCH)
    controls = set(dialect.tokenizer.control_ids.values())
    odd = [i for id_ in turn for i in ([id_] if id_ in controls else spelled(name, dialect.tokenizer.decode([id_])))]
    assert odd != turn
    assert dialect.parse(odd) == SEARCH
    assert dialect.render_observation("found", odd) == dialect.render_observation("found", turn)


def test_answers_of_two_turns_are_both_there_in_order(dialect):
    """Faults 2 and 8."""
    turn = dialect.render_call(SEARCH)
    row = dialect.render_prompt("question-0", "system-0") + turn + dialect.render_observation("answer-1", turn)
    text = dialect.tokenizer.decode(row + turn + dialect.render_observation("answer-2", turn))
    assert [text.count(word) for word in ("system-0", "question-0", "answer-1", "answer-2")] == [1] * 4
    assert text.index("system-0") < text.index("question-0") < text.index("answer-1") < text.index("answer-2")


def test_the_plain_dialect_reads_as_it_says():
    dialect = stand_in_dialect("plain")
    turn = dialect.render_call(SUBMIT)
    text = dialect.tokenizer.decode(dialect.render_prompt("Q") + turn + dialect.render_observation("found", turn))
    system, rest = text.split("### user\n", 1)
    assert (
        "\nsubmit(ranking: integers) Submits the ranking of documents and ends the task. ranking: Numbers of" in system
    )
    assert all(word in system for tool in TOOLS for word in (tool.name, *[p.description for p in tool.parameters]))
    assert rest == (
        "Q<|endoftext|>\n### assistant\n"
        '<tool_call>\n{"name": "submit", "arguments": {"ranking": [3, 1]}}\n</tool_call><|endoftext|>'
        "\n### user\n<tool_response>\nfound\n</tool_response><|endoftext|>\n### assistant\n"
    )
    # With the tokens of a chat model, these mark the turns.
    chat = build_dialect("plain", stand_in("qwen3")[1])
    assert chat.tokenizer.decode(chat.render_prompt("Q", "S")) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_tools_and_system_the_templates_have_their_say():
    def prompt(name, system):
        dialect = build_dialect(name, stand_in(name)[1])
        return dialect.tokenizer.decode(dialect.render_prompt("Q", system))

    assert prompt("qwen3", None) == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert prompt("qwen3_6", "S ").startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n")
    assert prompt("harmony", "S").count("<|start|>developer<|message|># Instructions\n\nS\n\n<|end|>") == 1
    assert "developer" not in prompt("harmony", None)
    assert prompt("gemma4", "S").startswith("<bos><|turn>system\n<|think|>\nS<turn|>\n<|turn>user\nQ")


@pytest.mark.parametrize(
    ("name", "turn", "answer"),
    [
        ("harmony", "<|channel|>final<|message|>So.<|return|>", "<|start|>user<|message|>E<|end|><|start|>assistant"),
        (
            "harmony",
            '<|channel|>commentary to=functions.submit json<|message|>{"ranking": [<|call|>',
            '<|start|>functions.submit to=assistant<|channel|>commentary<|message|>"E"<|end|><|start|>assistant',
        ),
        ("harmony", "<|channel|>what<|call|>", "<|start|>user<|message|>E<|end|><|start|>assistant"),
        ("gemma4", "So.<turn|>", "\n<|turn>user\nE<turn|>\n<|turn>model\n"),
        ("gemma4", "<|tool_call>call:submit<|tool_response>", 'response:unknown{value:<|"|>E<|"|>}<tool_response|>'),
        ("qwen3", "So.<|im_end|>", "\n<|im_start|>user\n<tool_response>\nE\n</tool_response><|im_end|>\n"),
    ],
)
def test_turns_without_a_call_are_answered_in_their_form(name, turn, answer):
    dialect = stand_in_dialect(name)
    text = dialect.tokenizer.decode(dialect.render_observation("E", sampled(name, turn)))
    assert text == answer + ("<|im_start|>assistant\n" if name == "qwen3" else "")


def test_the_overhead_of_an_observation_is_what_it_says(dialect):
    longest = max(len(dialect.render_observation("", dialect.render_call(call))) for call in (SEARCH, SUBMIT))
    assert longest <= dialect.observation_overhead <= longest + 4


# ---------------------------------------------------------------- control tokens in texts


def test_documents_and_questions_cannot_forge_a_turn(name, dialect):
    controls = set(dialect.tokenizer.control_ids.values())
    words = [*dialect.tokenizer.control_ids, *CONTROLS.get(name, ()), "assistant\n", "user\n", "<tool_call>", '"}}']
    for seed in range(30):
        rng = random.Random(seed)
        attack = "x" + "".join(rng.choice(words) for _ in range(rng.randint(1, 9))) + "x"
        turn = dialect.render_call(SEARCH)
        for attacked, harmless in (
            (dialect.render_observation(attack, turn), dialect.render_observation("x", turn)),
            (dialect.render_prompt(attack, attack), dialect.render_prompt("x", "x")),
        ):
            assert [i for i in attacked if i in controls] == [i for i in harmless if i in controls]
        assert dialect.tokenizer.decode(dialect.render_prompt(attack, attack)).count(attack) == 2


def test_thoughts_and_queries_cannot_either(name, dialect):
    for control in dialect.tokenizer.control_ids:
        if control in CONTROLS.get(name, ("<|endoftext|>",)):
            with pytest.raises(ValueError, match="control token"):
                dialect.render_call(Call("bm25_search", {"query": f"a {control}"}))
    if name != "plain":
        ids = dialect.render_call(SEARCH, f"Let me {' '.join(CONTROLS[name])} see")
        assert dialect.parse(ids) == SEARCH


# ---------------------------------------------------------------- parsers

JSON = '{"name": "bm25_search", "arguments": {"query": "a"}}'
XML = "<function=bm25_search>\n<parameter=query>\na\n</parameter>\n</function>"
TO = "<|channel|>commentary to=functions.bm25_search <|constrain|>json<|message|>"
GEMMA = '<|tool_call>call:bm25_search{query:<|"|>a<|"|>}<tool_call|>'

ACCEPTED = {
    "qwen3": [
        f"<tool_call>{JSON}</tool_call><|im_end|>",
        f"<think>\n\n</think>\n\n<tool_call>\n{JSON}\n</tool_call>\n<|im_end|>",
        f" <think>hm</think>I search.<tool_call>\n\n {JSON} </tool_call> <|im_end|>",
        '<tool_call>{"arguments":{"query":"a"},\n"name":"bm25_search"}</tool_call><|im_end|>',
        "<think>spelled: {spelled}</think><tool_call>" + JSON + "</tool_call><|im_end|>",
    ],
    "qwen3_6": [
        f"</think><tool_call>{XML}</tool_call><|im_end|>",
        f"hm\n</think>\n\nI search.\n\n<tool_call>\n{XML}\n</tool_call>\n<|im_end|>",
        "</think><tool_call><function=bm25_search><parameter=query>a</parameter></function></tool_call><|im_end|>",
        "</think><tool_call> <function=bm25_search> \n <parameter=query>\na</parameter>\n\n</function> </tool_call>"
        "<|im_end|>",
    ],
    "harmony": [
        TO + '{"query": "a"}<|call|>',
        '<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.bm25_search<|channel|>commentary json'
        '<|message|>{"query": "a"}<|call|>',
        '<|channel|>commentary<|message|>I search.<|end|><|start|>assistant' + TO + ' {"query":\n"a"} <|call|>',
        '<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>commentary to=functions.bm25_search'
        '<|constrain|>json<|message|>{"query": "a"}<|call|>',
        ' to=functions.bm25_search<|channel|>commentary<|message|>{"query": "a"}<|call|>',
    ],
    "gemma4": [
        GEMMA + "<|tool_response>",
        "<|channel>thought\nhm\n<channel|>" + GEMMA + "\n<|tool_response>",
        "\n<|channel>thought\n<channel|>\n" + GEMMA + "<|tool_response>",
        '<|tool_call> call: bm25_search {\n query : <|"|>a<|"|> } <tool_call|><|tool_response>',
        '<|tool_call>call:bm25_search{<|"|>query<|"|>:<|"|>a<|"|>}<tool_call|><|tool_response>',
    ],
    "plain": [
        f"<tool_call>{JSON}</tool_call><|endoftext|>",
        f"I search. <tool_call>\n {JSON}\n\n</tool_call>\n<|endoftext|>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "turn"), [(name, turn) for name, turns in ACCEPTED.items() for turn in turns])
def test_what_models_do_is_read_as_the_same_call(name, turn):
    before, marker, after = turn.partition("{spelled}")
    ids = sampled(name, before) + (spelled(name, "<tool_call></think>") + sampled(name, after) if marker else [])
    assert stand_in_dialect(name).parse(ids) == Call("bm25_search", {"query": "a"})


NUMBERS = ("[3, 1]", '["3", "1"]', "[3,1]", '"[3, 1]"', '[3, "1"]')


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("family", NAMES)
def test_numbers_may_be_strings(family, numbers):
    body = f'{{"name": "submit", "arguments": {{"ranking": {numbers}}}}}'
    turns = {
        "qwen3": f"<tool_call>{body}</tool_call><|im_end|>",
        "qwen3_6": "</think><tool_call><function=submit><parameter=ranking>\n"
        f"{numbers}\n</parameter></function></tool_call><|im_end|>",
        "harmony": f'<|channel|>commentary to=functions.submit<|message|>{{"ranking": {numbers}}}<|call|>',
        "gemma4": "<|tool_call>call:submit{ranking:" + numbers.replace('"', '<|"|>') + "}<tool_call|><|tool_response>",
        "plain": f"<tool_call>{body}</tool_call><|endoftext|>",
    }
    parsed = stand_in_dialect(family).parse(sampled(family, turns[family]))
    if family == "qwen3_6" and numbers.startswith('"'):
        parsed = Call("submit", {"ranking": json.loads(json.loads(parsed.arguments["ranking"]))})
    assert parsed == SUBMIT


@pytest.mark.parametrize("odd", ["1e999", "NaN", "-Infinity"])
def test_strings_of_no_finite_number_stay_strings(odd):
    turn = f'<tool_call>{{"name": "submit", "arguments": {{"ranking": ["{odd}", "2"]}}}}</tool_call><|im_end|>'
    assert stand_in_dialect("qwen3").parse(sampled("qwen3", turn)) == Call("submit", {"ranking": [odd, 2]})


def test_any_json_is_written_and_read_back(dialect, name):
    call = Call("any", {"b": {"D": [1.5, None, True, [], {}], "c": 'ä\n"q" \\ {x:1}'}, "A": -3, "日本": ""})
    if name == "qwen3_6":  # of a tool that it does not know, all that it reads are strings
        call = Call("any", {key: json.dumps(value) for key, value in call.arguments.items()})
    assert dialect.parse(dialect.render_call(call)) == call
    if name == "gemma4":
        text = '{A:-3,b:{c:<|"|>ä\n"q" \\ {x:1}<|"|>,D:[1.5,null,true,[],{}]},日本:<|"|><|"|>}'
        assert dialect.tokenizer.decode(dialect.render_call(call)).startswith(f"<|tool_call>call:any{text}<tool_call|>")


def test_what_is_no_number_is_left_to_the_environment(dialect, name):
    call = Call("bm25_search", {"query": "12"})
    assert dialect.parse(dialect.render_call(call)) == call
    if name != "qwen3_6":
        odd = Call("submit", {"ranking": ["x", 1.5, None, ["2"]]})
        assert dialect.parse(dialect.render_call(odd)) == odd


CLOSED = {
    "qwen3": ("<tool_call>", "</tool_call>", "<|im_end|>"),
    "qwen3_6": ("</think><tool_call>", "</tool_call>", "<|im_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", "<|tool_response>"),
    "plain": ("<tool_call>", "</tool_call>", "<|endoftext|>"),
}
BODY = {"qwen3": JSON, "plain": JSON, "qwen3_6": XML, "gemma4": 'call:bm25_search{query:<|"|>a<|"|>}'}


def in_tags(name, body):
    start, end, stop = CLOSED[name]
    return start + body + end + stop


COMMON_FAULTS = {
    "": "empty",
    "{stop}": "empty",
    "{call}": "missing_stop",
    "{start}": "missing_stop",
    "{call} {stop} more": "missing_stop",
    "{call}{call}{stop}": "several_calls",
    "{start}{body}{stop}": "half_call",
    "{call} and so{stop}": "text_after",
}

FAULTS = {
    "qwen3": {
        "I would search.<|im_end|>": "no_call",
        JSON + "<|im_end|>": "no_call",
        "<think>hm" + in_tags("qwen3", JSON): "half_thinking",
        "<think>hm<|im_end|>": "half_thinking",
        "<think><think></think>" + in_tags("qwen3", JSON): "half_thinking",
        "<|fim_prefix|>" + in_tags("qwen3", JSON): "control_inside",
        "</think>" + in_tags("qwen3", JSON): "control_inside",
        in_tags("qwen3", '{"query": "x"'): "not_json",  # fault 27
        in_tags("qwen3", ""): "not_json",
        in_tags("qwen3", JSON + JSON): "not_json",
        in_tags("qwen3", JSON[:9] + "<|im_start|>" + JSON[9:]): "control_inside",
        in_tags("qwen3", '{"name": "submit"}'): "wrong_keys",
        in_tags("qwen3", '{"name": 1, "arguments": {}}'): "name_not_string",
        in_tags("qwen3", '{"name": "submit", "arguments": "{}"}'): "arguments_not_object",
        in_tags("qwen3", '{"name": "submit", "arguments": {"ranking": [NaN]}}'): "not_finite",
        in_tags("qwen3", '{"name": "submit", "name": "submit", "arguments": {}}'): "duplicate_key",
        in_tags("qwen3", '{"name": "submit", "arguments": {"ranking": "\\"}}"}}'): "scaffold_inside",
        in_tags(
            "qwen3", '{"name": "bm25_search", "arguments": {"query": "\\u003ctool_call\\u003e"}}'
        ): "control_inside",
    },
    "qwen3_6": {
        "I would search.\n</think>\n\nBut how?<|im_end|>": "no_call",
        "hm<tool_call>" + XML + "</tool_call><|im_end|>": "half_thinking",
        "<think>hm</think><tool_call>" + XML + "</tool_call><|im_end|>": "half_thinking",
        "hm</think></think><tool_call>" + XML + "</tool_call><|im_end|>": "control_inside",
        in_tags("qwen3_6", JSON): "not_function",
        in_tags("qwen3_6", XML.replace("</function>", "")): "not_function",
        in_tags("qwen3_6", XML.replace("=bm25_search", "")): "not_function",
        in_tags("qwen3_6", "so: " + XML): "not_function",
        in_tags("qwen3_6", XML.replace("\n</parameter>", "")): "half_parameter",
        in_tags("qwen3_6", XML.replace("<parameter=query>\n", "")): "not_parameters",
        in_tags("qwen3_6", XML.replace("</function>", "and</function>")): "not_parameters",
        in_tags("qwen3_6", XML + XML): "not_parameters",
        in_tags("qwen3_6", XML.replace("a\n", "a <parameter=b>\n")): "scaffold_inside",
        in_tags("qwen3_6", XML.replace("</function>", XML[23:])): "duplicate_key",
        in_tags("qwen3_6", XML.replace("a\n", "<|im_start|>\n")): "control_inside",
    },
    "harmony": {
        "": "empty",
        "<|call|>": "empty",
        TO + '{"query": "a"}': "missing_stop",
        TO + '{"query": "a"}<|call|> ': "missing_stop",
        TO + '{"query": "a"}<|return|>': "wrong_stop",
        "<|channel|>final<|message|>So.<|return|>": "no_call",
        "<|channel|>analysis<|message|>hm<|call|>": "no_call",
        "<|channel|>final<|message|>So.<|end|><|start|>assistant" + TO + '{"query": "a"}<|call|>': "text_before",
        TO + '{"query": "a"}<|end|><|start|>assistant' + TO + '{"query": "a"}<|call|>': "several_calls",
        TO.replace("commentary", "analysis") + '{"query": "a"}<|call|>': "wrong_channel",
        TO.replace("functions.", "browser.") + '{"query": "a"}<|call|>': "wrong_recipient",
        TO.replace("functions.bm25_search", "functions.") + '{"query": "a"}<|call|>': "wrong_recipient",
        " to=functions.bm25_search<|channel|>commentary to=functions.submit json"
        '<|message|>{"query": "a"}<|call|>': "wrong_recipient",
        "<|channel|>commentary??" + '<|message|>{"query": "a"}<|call|>': "half_message",
        '<|message|>{"query": "a"}<|call|>': "half_message",
        '{"query": "a"}<|call|>': "half_message",
        "<|channel|>analysis<|message|>hm<|end|>assistant" + TO + "{}<|call|>": "half_message",
        "<|channel|>analysis<|message|>hm<|start|>assistant" + TO + "{}<|call|>": "control_inside",
        TO.replace("<|message|>", "<|start|><|message|>") + "{}<|call|>": "half_message",
        TO + "{<|message|>}<|call|>": "control_inside",
        TO + "{}<|end|><|call|>": "half_message",
        TO + '{"query": "a"<|call|>': "not_json",
        TO + "<|call|>": "not_json",
        TO + '{"query": 1e999}<|call|>': "not_finite",
        TO + '{"query": "a", "query": "a"}<|call|>': "duplicate_key",
        TO + '{"query": "\\"}}"}<|call|>': "scaffold_inside",
        TO + '{"query": "\\u003c|call|>"}<|call|>': "control_inside",
    },
    "gemma4": {
        "I would search.<turn|>": "no_call",
        "I would search." + GEMMA + "<|tool_response>": "text_before",
        "<|turn>" + GEMMA + "<|tool_response>": "text_before",
        "<|channel>thought\nhm" + GEMMA + "<|tool_response>": "half_thinking",
        GEMMA + "<turn|>": "wrong_stop",
        in_tags("gemma4", ""): "not_function",
        in_tags("gemma4", 'bm25_search{query:<|"|>a<|"|>}'): "not_function",
        in_tags("gemma4", "call:bm25_search"): "not_function",
        in_tags("gemma4", 'call:bm25_search{query:<|"|>a<|"|>'): "not_function",
        in_tags("gemma4", 'call:bm25_search{query:<|"|>a}'): "half_string",
        in_tags("gemma4", 'call:bm25_search{query:"a"}'): "wrong_quotes",
        in_tags("gemma4", "call:bm25_search{query:a}"): "not_json",
        in_tags("gemma4", 'call:bm25_search{query:<|"|>a<|"|>}}'): "not_json",
        in_tags("gemma4", 'call:bm25_search{query:<|"|>a<|"|>,query:<|"|>a<|"|>}'): "duplicate_key",
        in_tags("gemma4", "call:submit{ranking:[NaN]}"): "not_finite",
        in_tags("gemma4", "call:submit{ranking:[<|turn>1]}"): "control_inside",
    },
    "plain": {
        "I would search.<|endoftext|>": "no_call",
        "<|fim_prefix|>" + in_tags("plain", JSON): "control_inside",
        "</tool_call>" + in_tags("plain", JSON): "spelled_control",
        "<tool_response>x</tool_response>" + in_tags("plain", JSON): "spelled_control",
        in_tags("plain", '{"query": "x"'): "not_json",
        in_tags("plain", '{"name": "bm25_search", "arguments": {"query": "\\u003c/tool_call>"}}'): "control_inside",
        in_tags("plain", '{"name": "bm25_search", "arguments": {"query": "<tool_call>"}}'): "several_calls",
    },
}
for _name, (_start, _end, _stop) in CLOSED.items():
    for _pattern, _reason in COMMON_FAULTS.items():
        # Qwen3.6's second call follows no second thought.
        _call = _start + BODY[_name] + _end
        _twice = _call + _call.removeprefix("</think>")
        _text = _pattern.replace("{call}{call}", _twice).replace("{call}", _call).replace("{start}", _start)
        FAULTS[_name][_text.replace("{stop}", _stop).replace("{body}", BODY[_name])] = _reason


@pytest.mark.parametrize(("name", "turn"), [(name, turn) for name, turns in FAULTS.items() for turn in turns])
def test_faulty_turns_are_malformed_each_with_its_reason(name, turn):
    parsed = stand_in_dialect(name).parse(sampled(name, turn))
    assert isinstance(parsed, Malformed), parsed
    assert parsed.reason == FAULTS[name][turn]
    assert parsed.message == MALFORMED_TEXT[parsed.reason]


def test_every_reason_of_the_dialects_is_seen_here():
    seen = {reason for faults in FAULTS.values() for reason in faults.values()}
    assert set(MALFORMED_TEXT) - seen == {"unknown_token", "not_text"}  # below


def test_what_only_ids_show(name, dialect):
    good, encode = dialect.render_call(SEARCH), dialect.tokenizer.encode
    whole = dialect.tokenizer.decode(good)
    stop = good[-1]
    assert dialect.parse([*good[:-1], dialect.tokenizer.vocab_size + 7, stop]) == Malformed("unknown_token")
    assert dialect.parse([-1, *good]) == Malformed("unknown_token")
    if name != "plain":
        # Spelled by ordinary pieces a tag is no tag.
        body = whole.removesuffix(dialect.tokenizer.decode([stop]))
        before = sampled(name, "</think>") if name == "qwen3_6" else []
        spelled_turn = [*before, *encode(body.removeprefix("\n</think>\n\n")), stop]
        assert dialect.parse(spelled_turn).reason in ("spelled_control", "half_message")
        # Half a character: harmless in a thought, not in a query.
        half = dialect.tokenizer.encode("é")[:1]
        at = next(i for i in range(len(good)) if dialect.tokenizer.decode(good[i : i + 1]) == "x")
        assert dialect.parse([*good[:at], *half, *good[at:]]) == Malformed("not_text")
        thinking = dialect.render_call(SEARCH, "hm")
        at = next(i for i in range(len(thinking)) if "h" in dialect.tokenizer.decode(thinking[i : i + 1]) and i < 14)
        assert isinstance(dialect.parse([*thinking[: at + 1], *half, *thinking[at + 1 :]]), Call | Malformed)


@pytest.mark.parametrize(
    "arguments",
    [{"query": "\ud800"}, {"query": float("nan")}, {"query": {1, 2}}, {1: 2}, {"query": [[]] * 2 + [{"a": {3}}]}],
)
def test_calls_that_would_not_be_read_back_are_not_rendered(dialect, arguments):
    with pytest.raises(ValueError, match="expected"):
        dialect.render_call(Call("bm25_search", arguments))
    with pytest.raises(ValueError, match="expected"):
        dialect.render_call(Call("two words<|im_end|>", arguments))


def test_no_cut_of_a_call_is_executed(dialect):
    """A turn that the token limit cuts, at any token, with an end put behind it or not."""
    for call in (SEARCH, SUBMIT):
        turn = dialect.render_call(call)
        assert dialect.parse(turn) == call
        for cut in range(len(turn)):
            assert isinstance(dialect.parse(turn[:cut]), Malformed)
        for stop in dialect.stop_ids:
            for cut in range(len(turn) - 1):
                parsed = dialect.parse([*turn[:cut], stop])
                # The line break before a closing tag may be missing.
                assert isinstance(parsed, Malformed), dialect.tokenizer.decode(turn[:cut])


def test_fuzz_whatever_is_accepted_is_whole_and_means_what_it_says(name, dialect):
    rng = random.Random(0)
    backend, tokenizer = stand_in(name)
    seeds = [dialect.render_call(SEARCH), dialect.render_call(SUBMIT)]
    if name != "plain":
        seeds += [dialect.render_call(SEARCH, "hm"), dialect.render_call(SUBMIT, "hm")]
    seeds += [sampled(name, turn) for turn in ACCEPTED[name] if "{spelled}" not in turn]
    lively = [*tokenizer.control_ids.values(), *tokenizer.encode('"\\{}[],: 0e-.u\n<>/=|'), *dialect.stop_ids] * 2
    num_accepted = 0
    for round_ in range(4_000):
        ids = list(seeds[round_ % len(seeds)])
        for _ in range(rng.randint(1, 4)):
            at, new = rng.randint(0, len(ids)), rng.choice(lively) if rng.random() < 0.7 else rng.randrange(-2, 400)
            edit = rng.randrange(6)
            if edit == 0:
                ids.insert(at, new)
            elif edit == 1:
                del ids[at : at + rng.randint(1, 3)]
            elif edit == 2:
                ids[at : at + 1] = [new]
            elif edit == 3:
                ids[at:at] = ids[at : at + rng.randint(1, 9)]
            elif edit == 4:
                ids[at : at + 2] = ids[at : at + 2][::-1]
            else:
                del ids[at:]
        parsed = dialect.parse(ids)
        dialect.render_observation("x", ids)
        if isinstance(parsed, Malformed):
            assert parsed.reason in MALFORMED_TEXT
            continue
        num_accepted += 1
        assert ids[-1] == dialect.stop_id
        if name in CLOSED:
            text = tokenizer.decode(ids)
            start, end, _ = CLOSED[name]
            assert text.count(start.removeprefix("</think>")) == text.count(end) == 1
        assert not any(control in string for control in CONTROLS.get(name, ()) for string in map(str, parsed.arguments))
        if parsed.name in {tool.name for tool in TOOLS} and set(parsed.arguments) <= {"query", "ranking"}:
            assert dialect.parse(dialect.render_call(parsed)) == parsed
    assert 80 < num_accepted < 3_000


# ---------------------------------------------------------------- in episodes


@pytest.mark.parametrize("keep", [0, 1])
def test_every_dialect_plays_demonstrations_whose_turns_are_read_back(dialect, keep):
    limits = Limits(max_turns=5, max_tokens_per_turn=300, max_tokens_per_episode=6000)
    env = tiny_env(dialect, limits, keep_observations=keep)
    demonstrator = Demonstrator(env, dialect, tiny_documents(), {"good": 1.0})
    for task in tiny_tasks()[1:8:3]:
        played = demonstrator.demonstrate(task, np.random.default_rng(0))
        assert played.status == "submitted"
        edges = np.flatnonzero(np.diff(played.is_action, prepend=False, append=False))
        turns = [played.token_ids[first:last].tolist() for first, last in edges.reshape(-1, 2)]
        assert len(played.row_starts) == (len(turns) - 1 if keep else 1)
        calls = [dialect.parse(turn) for turn in turns]
        assert [call.name for call in calls][-1] == "submit"
        assert all(isinstance(call, Call) for call in calls)


# ---------------------------------------------------------------- the choice


def test_a_dialect_is_chosen_by_name_for_the_tokenizer_of_its_family():
    ours = train_tokenizer(["the thing"], 300, ())
    assert isinstance(build_dialect("hermes", ours), HermesDialect)
    for name, kind in PRETRAINED.items():
        assert isinstance(build_dialect(name, stand_in(name)[1], TOOLS), kind)
        with pytest.raises(ValueError, match="expected the tokenizer of a pretrained model"):
            build_dialect(name, ours)
    with pytest.raises(ValueError, match="expected the tokenizer of a model trained here"):
        build_dialect("hermes", stand_in("plain")[1])
    with pytest.raises(ValueError, match="expected a dialect out of hermes, qwen3, .*, got 'chatml'"):
        build_dialect("chatml", stand_in("plain")[1])
    with pytest.raises(ValueError, match=r"tokenizer of a GPT-OSS model, got one without <\|start\|>, "):
        build_dialect("harmony", stand_in("gemma4")[1])
    with pytest.raises(ValueError, match="expected a tokenizer with an end token"):
        build_dialect("plain", type(stand_in("plain")[1])(stand_in("plain")[0].to_str()))
