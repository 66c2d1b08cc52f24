"""`loramux chat`: a conversation in the terminal."""

import asyncio
from typing import Annotated

import typer
from rich.markup import escape

from app.cli.http import StreamFailed, api_key, async_api, stream_text
from app.cli.output import JsonFlag, console, fail, print_json

Message = dict[str, str]


def chat(
    model: Annotated[str, typer.Option(help="An adapter, `name@v2`, or the base model.")],
    prompt: Annotated[str | None, typer.Argument(help="One question; none: a dialogue.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="The key; or LORAMUX_API_KEY.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.7,
    as_json: JsonFlag = False,
) -> None:
    """Talk to a model; answers stream."""
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    secret = api_key(key)
    history: list[Message] = []
    while True:
        question = prompt if prompt is not None else _next_question()
        if question is None:
            return
        history.append({"role": "user", "content": question})
        try:
            answer = asyncio.run(_answer(url, secret, options, history, quiet=as_json))
        except StreamFailed as error:
            fail(str(error))
        history.append({"role": "assistant", "content": answer})
        if prompt is not None:
            if as_json:
                print_json({"model": model, "answer": answer})
            return


def _next_question() -> str | None:
    """The next line that is not empty; None at the end of input."""
    while True:
        try:
            line = console.input("[bold cyan]you>[/] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if line.strip():
            return line


async def _answer(
    url: str | None,
    key: str,
    options: dict[str, object],
    history: list[Message],
    *,
    quiet: bool,
) -> str:
    parts = []
    async with async_api(url, key) as client:
        async for text in stream_text(client, {**options, "messages": history}):
            parts.append(text)
            if not quiet:
                console.print(escape(text), end="", soft_wrap=True, highlight=False)
    if not quiet:
        console.print()
    return "".join(parts)
