"""Calls to copy: one body for curl and for OpenAI's clients in Python and TypeScript."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """The call in one language. `language` is what its heading says."""

    language: str
    code: str


def examples(public_url: str, model: str, **body: Any) -> list[Example]:
    """A call of the chat API; without `body`, one that says hello."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]} | body
    return [
        Example("curl", _curl(public_url, body)),
        Example("Python", _python(public_url, body)),
        Example("TypeScript", _typescript(public_url, body)),
    ]


def first_call(public_url: str, model: str, key: str) -> str:
    """A whole call that says hello with this key's text, for curl."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    return _curl(public_url, body, key)


def _curl(public_url: str, body: Mapping[str, Any], key: str = "$LORAMUX_API_KEY") -> str:
    sent = json.dumps(body, ensure_ascii=False)
    return (
        f"curl {public_url}/v1/chat/completions \\\n"
        f'  -H "Authorization: Bearer {key}" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(sent)}"
    )


def _python(public_url: str, body: Mapping[str, Any]) -> str:
    own = {name: body[name] for name in body if name in _EXTENSIONS}
    arguments = [f"    {name}={_literal(v)}," for name, v in body.items() if name not in own]
    if own:
        arguments.append(f"    extra_body={_literal(own)},")
    return "\n".join(
        [
            "import os",
            "",
            "from openai import OpenAI",
            "",
            "client = OpenAI(",
            f'    base_url="{public_url}/v1", api_key=os.environ["LORAMUX_API_KEY"]',
            ")",
            "answer = client.chat.completions.create(",
            *arguments,
            ")",
            "print(answer.choices[0].message.content)",
        ]
    )


_EXTENSIONS = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Fields that OpenAI's client has no argument for."""


def _literal(value: object) -> str:
    """A JSON value as Python writes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    return repr(value)


def _typescript(public_url: str, body: Mapping[str, Any]) -> str:
    arguments = [f"  {name}: {json.dumps(v, ensure_ascii=False)}," for name, v in body.items()]
    return "\n".join(
        [
            'import OpenAI from "openai";',
            "",
            "const client = new OpenAI({",
            f'  baseURL: "{public_url}/v1",',
            "  apiKey: process.env.LORAMUX_API_KEY,",
            "});",
            "const answer = await client.chat.completions.create({",
            *arguments,
            "});",
            "console.log(answer.choices[0].message.content);",
        ]
    )
