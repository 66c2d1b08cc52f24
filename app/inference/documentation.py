"""The bodies as /docs shows them. What a call accepts is decided in `schemas`, which a test of
this file compares with it."""

from typing import Any

from app.inference.schemas import MOST_COMPLETION_LOGPROBS, MOST_TOP_LOGPROBS


def _number(low: float, high: float, default: float, about: str) -> dict[str, Any]:
    return {
        "type": "number",
        "minimum": low,
        "maximum": high,
        "default": default,
        "description": about,
    }


_SHARED: dict[str, Any] = {
    "model": {"type": "string", "description": "A name from GET /v1/models, or an adapter's id."},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}},
        "description": "With include_usage, one last chunk carries the usage and no choices.",
    },
    "n": {"type": "integer", "minimum": 1, "default": 1, "description": "Number of choices."},
    "stop": {
        "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "The answer ends before the first of these.",
    },
    "seed": {"type": "integer", "description": "Equal seeds draw equal random numbers."},
    "max_tokens": {"type": "integer", "minimum": 1, "description": "Per choice."},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "The newer name."},
    "temperature": _number(0, 2, 1, "0 takes the most likely token."),
    "top_p": _number(0, 1, 1, "Keeps the most likely tokens of this total probability."),
    "top_k": {"type": "integer", "default": 0, "description": "Keeps this many; 0 or -1: all."},
    "min_p": _number(0, 1, 0, "Drops tokens below this share of the most likely one's."),
    "repetition_penalty": _number(0.01, 10, 1, "Divides the logits of tokens already there."),
    "presence_penalty": _number(-2, 2, 0, "Lowers tokens that were generated."),
    "frequency_penalty": _number(-2, 2, 0, "Lowers tokens by how often they were generated."),
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "Token id to what is added to its logit.",
    },
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["name", "schema"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                    "description": {"type": "string"},
                    "schema": {"type": "object"},
                    "strict": {"type": "boolean", "description": "Kept whatever is sent."},
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
        "description": "An answer that ends with `stop` validates, unless a stop string cut it.",
    },
    "loramux": {
        "type": "object",
        "properties": {
            "ttft_ms": {"type": "number", "description": "May only loosen the tenant's budget."},
            "tpot_ms": {"type": "number", "description": "May only loosen the tenant's budget."},
        },
    },
    "user": {"type": "string", "description": "Without effect."},
    "metadata": {"type": "object", "description": "Without effect."},
    "store": {"type": "boolean", "enum": [False], "description": "Without effect."},
    "service_tier": {
        "type": "string",
        "enum": ["auto", "default"],
        "description": "Without effect.",
    },
    "prompt_cache_key": {"type": "string", "description": "Without effect."},
    "safety_identifier": {"type": "string", "description": "Without effect."},
}

_CONTENT: dict[str, Any] = {
    "oneOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {
                    "type": {"type": "string", "enum": ["text"]},
                    "text": {"type": "string"},
                },
            },
        },
    ]
}

_USER_CONTENT: dict[str, Any] = {
    "oneOf": [{"type": "string", "minLength": 1}, _CONTENT["oneOf"][1]]
}


def _message(
    *roles: str,
    content: dict[str, Any] = _CONTENT,
    required: tuple[str, ...] = (),
    **more: dict[str, Any],
) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", "content", *required],
        "properties": {"role": {"type": "string", "enum": list(roles)}, "content": content} | more,
    }


_FUNCTION_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_NAMED_FUNCTION = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _FUNCTION_NAME},
        },
    },
}
_CALLS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["id", "type", "function"],
        "properties": {
            "id": {"type": "string", "minLength": 1},
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "arguments": {"type": "string", "description": "JSON, as the answer gave it."},
                },
            },
        },
    },
}

_CHAT: dict[str, Any] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                _message("system", "developer", "assistant"),
                _message("user", content=_USER_CONTENT),
                _message(
                    "assistant",
                    content={"type": "null"},
                    tool_calls=_CALLS,
                    required=("tool_calls",),
                ),
                _message("tool", tool_call_id={"type": "string"}, required=("tool_call_id",)),
            ]
        },
    },
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": _FUNCTION_NAME,
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                        "strict": {"type": "boolean"},
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
        "description": "Needs a base model whose chat format has tools.",
    },
    "tool_choice": {
        "oneOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED_FUNCTION],
        "description": "What is called where it is required, or named, fits its parameters.",
    },
    "parallel_tool_calls": {
        "type": "boolean",
        "default": True,
        "description": "Whether an answer may hold several calls.",
    },
    "logprobs": {"type": "boolean", "default": False},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MOST_TOP_LOGPROBS},
}

_COMPLETION: dict[str, Any] = {
    "prompt": {
        "oneOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        ],
        "description": "One text, or the ids of its tokens.",
    },
    "logprobs": {"type": "integer", "minimum": 0, "maximum": MOST_COMPLETION_LOGPROBS},
}


def _body(required: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["model", required],
        "properties": properties,
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


CHAT_BODY = _body("messages", _CHAT | _SHARED)
COMPLETION_BODY = _body("prompt", _COMPLETION | _SHARED)
