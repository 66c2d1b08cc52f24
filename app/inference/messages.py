"""The messages of a chat: what each role may hold, and what of it the chat template is given."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from app.inference.fields import Fields, kind, refused, unsupported
from app.settings import Settings

Message = dict[str, Any]
"""Role and content; a call's arguments are an object, as chat templates write them."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_messages(value: object, settings: Settings) -> tuple[Message, ...]:
    """Raises InvalidRequest, which names the field."""
    if value is None:
        raise refused("messages", "is missing; send at least one message", code="missing_parameter")
    if not isinstance(value, list):
        raise refused("messages", f"must be a list of messages, not {kind(value)}")
    if not value:
        raise refused("messages", "is empty; send at least one message", code="empty_messages")
    if len(value) > settings.max_messages:
        raise refused(
            "messages", f"has {len(value)} messages; send at most {settings.max_messages}"
        )
    called: dict[str, str] = {}  # the function of every call so far, by the call's id
    return tuple(
        _message(message, f"messages[{index}]", called, settings.max_tools)
        for index, message in enumerate(value)
    )


def needs_tools(messages: Sequence[Message]) -> str | None:
    """The first field that only a chat format with tools can write, or None."""
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            return f"messages[{index}].role"
        if message.get("tool_calls"):
            return f"messages[{index}].tool_calls"
    return None


def _message(value: object, path: str, called: dict[str, str], most_calls: int) -> Message:
    if not isinstance(value, dict):
        raise refused(path, f"must be an object with role and content, not {kind(value)}")
    fields = Fields(value, path)
    role = fields.take("role")
    if role == "function":
        raise unsupported(f"{path}.role", "send role tool", code="tools_unsupported")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    if fields.take("function_call"):
        raise unsupported(f"{path}.function_call", "send tool_calls", code="tools_unsupported")
    # The chat formats served here know no developer: it is the later name of system.
    message: Message = {"role": "system" if role == "developer" else role}
    calls = _calls(fields.take("tool_calls"), f"{path}.tool_calls", called, most_calls)
    if calls and role != "assistant":
        raise refused(f"{path}.tool_calls", "belong to messages of the role assistant")
    content = fields.take("content")
    if content is None and calls:
        content = ""
    message["content"] = _content(content, f"{path}.content")
    if not message["content"] and role == "user":
        raise refused(f"{path}.content", "is empty; send some text", code="empty_message")
    if calls:
        message["tool_calls"] = calls
    answered = fields.take("tool_call_id")
    if role == "tool":
        message |= _answered(answered, f"{path}.tool_call_id", called)
    elif answered is not None:
        raise refused(f"{path}.tool_call_id", "belongs to messages of the role tool")
    if fields.take("annotations"):
        raise unsupported(f"{path}.annotations", "remove it")
    if role == "tool":
        fields.take("name")  # the call says it
    fields.refuse(
        {
            "name": "write the speaker's name into the content",
            "refusal": "put the refusal's text into content",
            "audio": "send text",
        }
    )
    fields.finish()
    return message


def _answered(value: object, path: str, called: dict[str, str]) -> Message:
    """Which call a result answers."""
    if not isinstance(value, str) or value not in called:
        raise refused(path, "must be the id of a tool call in an earlier message")
    return {"tool_call_id": value, "name": called[value]}


def _calls(value: object, path: str, called: dict[str, str], most: int) -> list[Message]:
    if value is None or value == []:
        return []
    if not isinstance(value, list):
        raise refused(path, f"must be a list of tool calls, not {kind(value)}")
    if len(value) > most:
        raise refused(path, f"has {len(value)} calls; send at most {most}")
    return [_call(call, f"{path}[{index}]", called) for index, call in enumerate(value)]


def _call(value: object, path: str, called: dict[str, str]) -> Message:
    if not isinstance(value, dict):
        raise refused(path, f"must be an object with id, type and function, not {kind(value)}")
    fields = Fields(value, path)
    call_id = fields.text("id")
    if not call_id:
        raise refused(f"{path}.id", "is missing; send the id that the answer gave")
    if fields.take("type") not in ("function", None):
        raise unsupported(f"{path}.type", "calls of functions are; send function")
    fields.take("index")  # of a stream's delta
    own = fields.object("function")
    name = own.text("name") if own is not None else None
    if own is None or not name:
        raise refused(f"{path}.function.name", "is missing; send the function's name")
    arguments = own.text("arguments")
    own.finish()
    fields.finish()
    called[call_id] = name
    function = {"name": name, "arguments": _arguments(arguments or "{}")}
    return {"id": call_id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """The object that the text stands for; a text that is no JSON stays as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def texts_of(messages: Collection[Message]) -> list[str]:
    """The contents, whose length bounds the prompt's from below."""
    return [message["content"] for message in messages]


def _content(value: object, path: str) -> str:
    """A string, or a list of text parts joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(path, f"must be a string or a list of text parts, not {kind(value)}")
    texts = []
    for index, part in enumerate(value):
        at = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise refused(at, f"must be an object with type and text, not {kind(part)}")
        fields = Fields(part, at)
        type_ = fields.take("type")
        if type_ != "text":
            raise unsupported(f"{at}.type", "this model reads text; send parts of type text")
        text = fields.text("text")
        if text is None:
            raise refused(f"{at}.text", "is missing; send the part's text")
        fields.finish()
        texts.append(text)
    return "".join(texts)
