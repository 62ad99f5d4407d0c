"""The dialect of Qwen3.6 (and 3.5): a thought always, and calls as XML.

    ...<|im_start|>assistant\\n<think>\\n
    {thought}\\n</think>\\n\\n<tool_call>\\n<function=bm25_search>\\n<parameter=query>\\n{query}\\n</parameter>\\n
    </function>\\n</tool_call><|im_end|>

The second and third lines are sampled, without the break between them. Strings stand as they are, other values as JSON.

Source: the chat template of Qwen/Qwen3.6-27B.
"""

from __future__ import annotations

import json
import re

from searchrl_jax.text.calls import Call, Malformed, checked, write_json
from searchrl_jax.text.qwen3 import CONTROLS, Qwen3Dialect
from searchrl_jax.text.segments import Markup

TOOLS_BEFORE = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_AFTER = Markup("""
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>""")

SCAFFOLDS = ("<function=", "</function>", "<parameter=", "</parameter>")

_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>\s*", re.DOTALL)


class Qwen36Dialect(Qwen3Dialect):
    """Renders and parses turns as ids of Qwen3.6's tokenizer."""

    family = "Qwen3.6"
    opening = Markup("<|im_start|>assistant\n<think>\n")

    def _system_words(self, system: str | None) -> list[str]:
        words = "" if system is None else system.strip()
        if not self.tools:
            return [] if system is None else [words]
        tools = "".join("\n" + json.dumps(tool.schema(), ensure_ascii=False) for tool in self.tools)
        return [TOOLS_BEFORE, tools, TOOLS_AFTER, "\n\n" + words if words else ""]

    def _trimmed(self, text: str) -> str:
        return text.strip()

    def _thought_words(self, thinking: str) -> list[str]:
        return [thinking.strip(), Markup("\n</think>\n\n")]

    def _call_text(self, call: Call) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else write_json(value, call)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"<function={call.name}>\n{parameters}</function>"

    def _read_call(self, body: str) -> Call | Malformed:
        function = _FUNCTION.fullmatch(body)
        if not function:
            return Malformed("not_function")
        name, rest = function.groups()
        arguments: dict[str, str] = {}
        at = 0
        while at < len(rest):
            parameter = _PARAMETER.match(rest, at)
            if not parameter:
                if not rest[at:].strip():
                    break
                return Malformed("half_parameter" if rest[at:].lstrip().startswith("<parameter=") else "not_parameters")
            key, value = parameter.groups()
            if key in arguments:
                return Malformed("duplicate_key")
            # The template sets each value between two line breaks; others in it are its own.
            arguments[key] = value.removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        return checked(Call(name, arguments), CONTROLS, SCAFFOLDS)
