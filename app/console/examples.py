"""Calls to copy: the same request for curl and for OpenAI's Python client."""

import json


def curl_call(public_url: str, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    return (
        f"curl {public_url}/v1/chat/completions \\\n"
        '  -H "Authorization: Bearer $LORAMUX_API_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{body}'"
    )


def python_call(public_url: str, model: str) -> str:
    return (
        "import os\n\n"
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{public_url}/v1", api_key=os.environ["LORAMUX_API_KEY"])\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{model}",\n'
        '    messages=[{"role": "user", "content": "Hello!"}],\n'
        ")\n"
        "print(answer.choices[0].message.content)"
    )
