"""`tools`, `tool_choice` and `parallel_tool_calls`: what the model may call, and what it must.

Calls that are forced (`required`, or a named function) validate against the functions' parameters;
so do those of `strict` functions wherever the model calls one. Otherwise it decides, and what it
writes is read by `tool_calls`. The grammar depends on the base model's chat format: `call_grammar`.
"""

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
    """What a call may do with tools.

    shown       what the prompt says of them
    forced      functions of which one must be called; empty where the model decides
    strict      functions whose arguments validate also where the model decides
    parallel    whether an answer may hold several calls
    answer      what content must look like where there is no call (`response_format`)
    """

    shown: tuple[dict[str, Any], ...]
    forced: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()
    parallel: bool = True
    answer: Grammar | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.shown)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """By function, in their order; none where it says nothing of them."""
        functions = (tool["function"] for tool in self.shown)
        return {own["name"]: own.get("parameters") or NO_PARAMETERS for own in functions}


def tool_use(fields: Fields, settings: Settings, answer: Grammar | None) -> ToolUse | None:
    """None where the call has no tools, or may call none."""
    for name, remedy in LEGACY.items():
        if fields.take(name) is not None:
            raise unsupported(name, remedy, code="tools_unsupported")
    tools, strict = _tools(fields.take("tools"), settings)
    wanted = _choice(fields.take("tool_choice"), tools)
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not tools or wanted == "none":
        return None
    forced: tuple[str, ...] = ()
    if wanted != "auto":
        forced = tuple(tools) if wanted == "required" else (wanted,)
    use = ToolUse(
        tuple(tools.values()),
        forced,
        strict,
        parallel=parallel and wanted in ("auto", "required"),
        answer=None if forced else answer,
    )
    for index, (name, schema) in enumerate(use.parameters.items()):
        if name in (forced or strict):
            check_schema(schema, f"tools[{index}].function.parameters", settings)
    return use


def _tools(value: object, settings: Settings) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """The tools by name, in their order, as OpenAI writes them; and the names of strict ones."""
    if value is None:
        return {}, frozenset()
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
    strict: set[str] = set()
    for index, tool in enumerate(value):
        name, definition, is_strict = _tool(tool, f"tools[{index}]")
        if name in tools:
            raise refused(f"tools[{index}].function.name", f"is {clip(name)}, as an earlier tool's")
        tools[name] = definition
        if is_strict:
            strict.add(name)
    return tools, frozenset(strict)


def _tool(value: object, path: str) -> tuple[str, dict[str, Any], bool]:
    """Its name, what the prompt says of it, and whether it is strict."""
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
    strict = own.flag("strict")
    own.finish()
    fields.finish()
    return name, {"type": "function", "function": function}, strict


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
