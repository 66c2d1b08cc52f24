"""How a base model writes tool calls, where its chat format has them.

Three families are read; the checkpoints' own templates are used.

hermes  <tool_call>{"name": …, "arguments": {…}}</tool_call>, anywhere and as often as the model
        likes: Qwen 2.5 and 3, Hermes 2 and 3, and others
llama   {"name": …, "parameters": {…}}, which is the whole answer: Llama 3.1, 3.2 and 3.3, whose
        templates take one call a message
mistral [TOOL_CALLS][{"name": …, "arguments": {…}}, …], after which the answer ends: Mistral 7B 0.3,
        Mixtral 8x22B, Nemo and others whose templates write calls as one list. The mark is a
        control token there. (Later ones write `[TOOL_CALLS]name[ARGS]{…}`, which is not read.)
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from engine.errors import EngineError

ToolFormat = Literal["hermes", "llama", "mistral"]
ToolSetting = Literal["auto", "hermes", "none"]

MISTRAL_MARK = "[TOOL_CALLS]"
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")

CHATML = frozenset({"<|im_start|>", "<|im_end|>"})

HERMES_OVER_CHATML = """\
{%- set first = messages[0] -%}
{{ '<|im_start|>system\\n' }}
{%- if first.role == 'system' %}{{ first.content + '\\n\\n' }}{% endif -%}
{%- if tools %}
{{- 'You may call the functions that these JSON objects describe, one a line:\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- '</tools>\\nA call is a JSON object with the name of the function and its arguments, ' }}
{{- 'written like this:\\n<tool_call>\\n' }}
{{- '{"name": "the function", "arguments": {"its parameter": "a value"}}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""For a ChatML model that was trained on Hermes calls but whose template says nothing of them."""


class ToolFormatRefused(EngineError):
    """The setting asks for a tool format that this base model cannot have."""

    code = "tool_format_refused"


def tool_template(
    template: str | None, control: Collection[str], setting: ToolSetting
) -> tuple[ToolFormat, str] | None:
    """The format and the template that writes it, or None where there is no such thing.

    "auto" takes the checkpoint's template where it writes calls of a known family. "hermes" takes
    the one above for other ChatML models. Raises ToolFormatRefused.
    """
    if setting == "none":
        return None
    if template is not None and setting == "auto" and writes_llama(template):
        return "llama", template
    if template is not None and setting == "auto" and writes_mistral(template):
        return "mistral", template
    if "<tool_call>" in control:  # as a control token it would be no text
        return None
    if template is not None and writes_hermes(template):
        return "hermes", template
    if setting == "auto":
        return None
    if not set(control) >= CHATML:
        raise ToolFormatRefused(
            "LORAMUX_TOOL_FORMAT=hermes needs a ChatML model, one with the control tokens "
            "<|im_start|> and <|im_end|>; set it to auto or none"
        )
    return "hermes", HERMES_OVER_CHATML


def writes_hermes(template: str) -> bool:
    """Whether a chat template shows tools and writes calls as Hermes does."""
    return "tools" in template and "<tool_call>" in template


def writes_llama(template: str) -> bool:
    """Whether it shows tools and writes calls as Llama 3.1's does: bare JSON, results in messages
    of the role ipython."""
    marks = ("tools", "ipython", '"parameters": ')
    return all(mark in template for mark in marks) and not writes_hermes(template)


def writes_mistral(template: str) -> bool:
    """Whether it shows tools and writes calls as Mistral's do that write one list of them."""
    return MISTRAL_MARK in template and "[AVAILABLE_TOOLS]" in template and "[ARGS]" not in template


def with_ids_of(family: ToolFormat, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as the family's templates take them: Mistral's refuse any but
    nine letters and digits, so a longer one becomes nine digits of its hash."""
    written = dict(message)
    if family != "mistral":
        return written
    if written.get("tool_calls"):
        written["tool_calls"] = [
            {**call, "id": _mistral_id(str(call.get("id", "")))} for call in written["tool_calls"]
        ]
    if "tool_call_id" in written:
        written["tool_call_id"] = _mistral_id(str(written["tool_call_id"]))
    return written


def _mistral_id(id_: str) -> str:
    if _MISTRAL_ID.fullmatch(id_):
        return id_
    return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def uses_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has calls or their results, which only a tool template can write."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
