"""The grammar of an answer that has calls, in the words of a family's chat format.

Lark, as llguidance reads it. Where the model decides, text is free until a call begins; from there
on the answer is held to the call. Without need of that there is no grammar, and so no cost.
"""

import json
from typing import Any

from app.inference.fields import unsupported
from app.inference.tools import ToolUse
from engine.tool_format import MISTRAL_MARK, ToolFormat
from engine.types import Grammar

MOST_CALLS = 16
"""Of an answer whose calls are forced: a model that is let go on may never end."""
WHITESPACE = r"(\x20|\n\x20{0,16})?"
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


def call_grammar(use: ToolUse, family: ToolFormat, mark: int | None = None) -> Grammar | None:
    """None where the model may write anything. `mark`: the control token that opens a call, where
    the checkpoint has one. Raises InvalidRequest (`response_format`) where a call could not be
    told from an answer."""
    parallel = use.parallel or family == "llama"  # whose answer is one call at most anyway
    if not use.forced and not use.strict and parallel and use.answer is None:
        return None
    calls = {
        name: schema if use.forced or name in use.strict else ANY_ARGUMENTS
        for name, schema in use.parameters.items()
        if not use.forced or name in use.forced
    }
    if family == "mistral":
        lines = _mistral(use, calls, mark)
    else:
        lines = _hermes(use, calls) if family == "hermes" else _llama(use, calls)
    return Grammar("lark", "\n".join(lines))


def _hermes(use: ToolUse, calls: dict[str, dict[str, Any]]) -> list[str]:
    """`<tool_call>` JSON `</tool_call>`, anywhere in the text and as often as the caller allows."""
    lines = [
        f"body: {_one_of(calls)}",
        *_bodies(calls, '\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    ]
    marked = 'call: "<tool_call>" body'
    several = f' ("\\n" call){{0,{MOST_CALLS - 1}}}' if use.parallel else ""
    if use.forced:
        return [f"start: call{several}", marked, *lines]
    if use.answer is not None:
        return [f"start: answer | call{several}", f"answer: {_json(use.answer)}", marked, *lines]
    return [
        "start: (lead body)* TEXT" if use.parallel else "start: TEXT | lead body",
        r'lead[lazy]: /(.|\n)*/ "<tool_call>"',
        r"TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/",
        *lines,
    ]


def _llama(use: ToolUse, calls: dict[str, dict[str, Any]]) -> list[str]:
    """The whole answer is one call; one that is none does not begin like one."""
    if use.answer is not None:
        raise unsupported(
            "response_format",
            "together with tools it is not by this base model, whose calls are bare JSON: send one "
            "of the two, or a tool_choice that forces a call",
        )
    lines = [
        f"call: {_one_of(calls)}",
        *_bodies(calls, '{{"name": "{name}", "parameters": ', "}"),
    ]
    if use.forced:
        return ["start: call", *lines]
    return ["start: TEXT | call", r"TEXT: /(.|\n)*/ & ~/\s*\{(.|\n)*/", *lines]


def _mistral(use: ToolUse, calls: dict[str, dict[str, Any]], mark: int | None) -> list[str]:
    """The mark and one list of calls, which ends the answer; before them free text, or none."""
    several = f' (", " call){{0,{MOST_CALLS - 1}}}' if use.parallel else ""
    lines = [
        f'list: / ?\\[/ call{several} "]"',
        f'call: ({_one_of(calls)}) id? "}}"',
        r'id: /, "id": "[A-Za-z0-9]{9}"/',
        *_bodies(calls, '{{"name": "{name}", "arguments": ', ""),
    ]
    opened = json.dumps(MISTRAL_MARK) if mark is None else f"<[{mark}]>"
    if use.forced:
        return [f"start: {opened} list", *lines]
    if use.answer is not None:
        return [f"start: answer | {opened} list", f"answer: {_json(use.answer)}", *lines]
    if mark is not None:  # which no text holds
        return [f"start: TEXT | TEXT {opened} list", r"TEXT: /(.|\n)*/", *lines]
    return [
        "start: TEXT | lead list",
        r'lead[lazy]: /(.|\n)*/ "[TOOL_CALLS]"',
        r"TEXT: /(.|\n)*/ & ~/(.|\n)*\[TOOL_CALLS\](.|\n)*/",
        *lines,
    ]


def _one_of(calls: dict[str, dict[str, Any]]) -> str:
    return " | ".join(f"body{index}" for index in range(len(calls)))


def _bodies(calls: dict[str, dict[str, Any]], head: str, tail: str) -> list[str]:
    """A rule for each function; `head` is a format string that takes its name."""
    return [
        f"body{index}: {json.dumps(head.format(name=name))} arguments{index} {json.dumps(tail)}\n"
        f"arguments{index}: {_embedded(schema)}"
        for index, (name, schema) in enumerate(calls.items())
    ]


def _json(grammar: Grammar) -> str:
    schema: dict[str, Any] = json.loads(grammar.text)
    return _embedded(schema)


def _embedded(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
