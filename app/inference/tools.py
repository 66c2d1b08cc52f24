"""`tools` and `tool_choice`: what the model may call, and the grammar where it must.

A call that is forced (`required`, or a named function) is one call that validates against the
function's parameters. With `auto` the model decides, and what it writes is read by `tool_calls`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from app.inference.fields import Fields, clip, kind, refused, unsupported
from app.inference.json_schema import check_schema
from app.settings import Settings
from engine.types import Grammar

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
WHITESPACE = r"(\x20|\n\x20{0,16})?"

UNSUPPORTED = (
    "this base model's chat format has no tools. Describe them in the prompt; for a ChatML model "
    "that knows Hermes' calls the operator can set LORAMUX_TOOL_FORMAT=hermes"
)
LEGACY = {
    "functions": "send tools, its later name",
    "function_call": "send tool_choice, its later name",
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a call may do with tools. `shown` is what the prompt says of them; empty: nothing."""

    shown: tuple[dict[str, Any], ...]
    names: frozenset[str]
    grammar: Grammar | None = None  # where a call is forced


def tool_use(fields: Fields, settings: Settings) -> ToolUse | None:
    """None where the call has no tools, or may call none."""
    for name, remedy in LEGACY.items():
        if fields.take(name) is not None:
            raise unsupported(name, remedy, code="tools_unsupported")
    value = fields.take("tools")
    choice = fields.take("tool_choice")
    tools = _tools(value, settings)
    wanted = _choice(choice, tools)
    if not tools or wanted == "none":
        return None
    shown = tuple(tools.values())
    if wanted == "auto":
        for index, tool in enumerate(value):
            if tool["function"].get("strict"):
                raise unsupported(
                    f"tools[{index}].function.strict",
                    "a call is held to its schema where tool_choice is required or names the "
                    "function; send one of the two, or strict=false",
                )
        return ToolUse(shown, frozenset(tools))
    forced = list(tools) if wanted == "required" else [wanted]
    for index, name in enumerate(tools):
        if name in forced:
            place = f"tools[{index}].function.parameters"
            check_schema(_parameters(tools[name]), place, settings)
    grammar = Grammar("lark", forced_call({name: _parameters(tools[name]) for name in forced}))
    return ToolUse(shown, frozenset(tools), grammar)


def forced_call(parameters: dict[str, dict[str, Any]]) -> str:
    """A Lark grammar of one Hermes call of one of these functions, by name."""
    lines = ["start: " + " | ".join(f"call{index}" for index in range(len(parameters)))]
    for index, (name, schema) in enumerate(parameters.items()):
        head = json.dumps(f'<tool_call>\n{{"name": "{name}", "arguments": ')
        tail = json.dumps("}\n</tool_call>")
        body = json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})
        lines += [f"call{index}: {head} arguments{index} {tail}", f"arguments{index}: %json {body}"]
    return "\n".join(lines)


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """A function's parameters; none where it says nothing of them."""
    given: dict[str, Any] | None = tool["function"].get("parameters")
    return given or NO_PARAMETERS


def _tools(value: object, settings: Settings) -> dict[str, dict[str, Any]]:
    """The tools by name, in their order, as OpenAI writes them."""
    if value is None:
        return {}
    if not isinstance(value, list):
        raise refused("tools", f"must be a list of tools, not {kind(value)}")
    if len(value) > settings.max_tools:
        raise refused("tools", f"has {len(value)} tools; send at most {settings.max_tools}")
    size = len(msgspec.json.encode(value))
    if size > settings.max_schema_bytes:
        raise refused(
            "tools",
            f"have {size} bytes together; send at most {settings.max_schema_bytes}",
            code="schema_too_complex",
        )
    tools: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(value):
        name, definition = _tool(tool, f"tools[{index}]")
        if name in tools:
            raise refused(f"tools[{index}].function.name", f"is {clip(name)}, as an earlier tool's")
        tools[name] = definition
    return tools


def _tool(value: object, path: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise refused(path, f"must be an object with type and function, not {kind(value)}")
    fields = Fields(value, path)
    if fields.take("type") != "function":
        raise unsupported(f"{path}.type", "tools of type function are; send one")
    own = fields.object("function")
    if own is None:
        raise refused(f"{path}.function", "is missing; send its name and parameters")
    name = own.text("name")
    if name is None or NAME.fullmatch(name) is None:
        raise refused(f"{path}.function.name", "must be 1 to 64 letters, digits, _ or -")
    function: dict[str, Any] = {"name": name}
    description = own.text("description")
    if description is not None:
        function["description"] = description
    parameters = own.take("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise refused(
                f"{path}.function.parameters",
                f"must be a JSON schema, an object, not {kind(parameters)}",
                code="invalid_schema",
            )
        function["parameters"] = parameters
    own.flag("strict")
    own.finish()
    fields.finish()
    return name, {"type": "function", "function": function}


def _choice(value: object, tools: dict[str, dict[str, Any]]) -> str:
    """ "none", "auto", "required", or the name of the function that must be called."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise refused("tool_choice", f"is {clip(value)!r}; send none, auto or required")
        if value == "required" and not tools:
            raise refused("tool_choice", "needs tools; send some, or remove it")
        return value
    if not isinstance(value, dict):
        raise refused("tool_choice", f"must be a string or an object, not {kind(value)}")
    fields = Fields(value, "tool_choice")
    if fields.take("type") != "function":
        raise unsupported("tool_choice.type", "name one tool with type function")
    own = fields.object("function")
    name = own.text("name") if own is not None else None
    if own is None or not name:
        raise refused("tool_choice.function.name", "is missing; name one of the tools")
    own.finish()
    fields.finish()
    if name not in tools:
        raise refused("tool_choice.function.name", f"is {clip(name)!r}, which is none of the tools")
    return name
