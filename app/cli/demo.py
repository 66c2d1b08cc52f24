"""`loramux demo`: two tenants, three adapters, one batch, four answers side by side."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from sqlalchemy.ext.asyncio import AsyncSession

from app.cli.adapters import push_all
from app.cli.database import ACTOR, in_transaction
from app.cli.http import StreamFailed, api, async_api, expect, require_server, stream_text
from app.cli.output import JsonFlag, console, fail, print_json
from app.clock import SystemClock
from app.errors import NotFound
from app.keys import service as keys
from app.platform import Platform
from app.tenants import service as tenants

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
CLOCK = SystemClock()
TENANTS = ("demo-harbour", "demo-kitchen")
DEFAULT_PROMPT = "What should I do on a rainy Sunday afternoon?"
MAX_TOKENS = 90


@dataclass
class Answer:
    """One stream of the demo, as far as it has come."""

    title: str
    tenant: str
    model: str
    key: str
    text: str = ""
    pieces: int = 0
    first_ms: float | None = None
    problem: str = ""
    done: bool = False
    started_ms: float = 0.0

    def panel(self) -> Panel:
        state = "waiting" if not self.text else "done" if self.done else "answering"
        first = f", first token after {self.first_ms:.0f} ms" if self.first_ms is not None else ""
        body = Text(self.problem, style="red") if self.problem else Text(self.text)
        return Panel(body, title=f"{self.title} · {self.tenant}", subtitle=f"{state}{first}")


def demo(
    prompt: Annotated[str, typer.Argument(help="The question that all four answer.")] = "",
    url: Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Example adapters of two tenants, uploaded through the API and answered in one batch.

    Needs a running server (`make run`) and its data folder (tenants are made in the database).
    """
    folders = sorted(folder for folder in EXAMPLES.glob("*") if folder.is_dir())
    if len(folders) < 3:
        fail(f"the example adapters are not in {EXAMPLES}: run this from a checkout")
    require_server(url)
    owners = [TENANTS[0], TENANTS[1], TENANTS[0]]
    secrets = {name: _key_of(name) for name in TENANTS}
    for owner in TENANTS:
        own = [folder for folder, name in zip(folders, owners, strict=False) if name == owner]
        push_all(url, secrets[owner].secret, own)
    with api(url, secrets[TENANTS[1]].secret) as client:
        models = expect(client.get("/v1/models"))["data"]
    base = next(model["id"] for model in models if "@" not in model["id"])
    answers = [
        Answer(folder.name, owner, folder.name, secrets[owner].secret)
        for folder, owner in zip(folders, owners, strict=False)
    ]
    answers.append(Answer("base model", TENANTS[1], base, secrets[TENANTS[1]].secret))
    asyncio.run(_answer_all(url, answers, prompt or DEFAULT_PROMPT, quiet=as_json))
    for made in secrets.values():
        _revoke(made.id)
    if as_json:
        shown = ("title", "tenant", "model", "text", "first_ms", "problem")
        print_json([{name: getattr(answer, name) for name in shown} for answer in answers])
    if any(answer.problem for answer in answers):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class DemoKey:
    id: str
    secret: str


def _key_of(tenant_name: str) -> DemoKey:
    """A key of the demo's tenant, which is made when it is not there; revoked at the end."""

    async def act(platform: Platform, session: AsyncSession) -> DemoKey:
        now = platform.clock.now()
        try:
            tenant = await tenants.find_by_name(session, tenant_name)
        except NotFound:
            tenant = await tenants.create_tenant(session, name=tenant_name, now=now, actor=ACTOR)
        made = await keys.create_key(
            session,
            secrets=platform.secrets,
            now=now,
            actor=ACTOR,
            tenant=tenant,
            name="demo",
        )
        return DemoKey(made.row.id, made.secret.text)

    return in_transaction(act)


def _revoke(key_id: str) -> None:
    async def act(platform: Platform, session: AsyncSession) -> None:
        now = platform.clock.now()
        await keys.revoke_key(session, key_id, now=now, actor=ACTOR, tenant_id=None)

    in_transaction(act)


async def _answer_all(url: str | None, answers: list[Answer], prompt: str, *, quiet: bool) -> None:
    if not quiet:
        console.print(Text.assemble(("you> ", "bold cyan"), prompt))
    view = contextlib.nullcontext() if quiet else Live(console=console, refresh_per_second=12)
    with view as live:
        streams = [asyncio.create_task(_follow(url, answer, prompt)) for answer in answers]
        while not all(stream.done() for stream in streams):
            await asyncio.sleep(0.08)
            if live is not None:
                live.update(_side_by_side(answers))
        await asyncio.gather(*streams)
        if live is not None:
            live.update(_side_by_side(answers))


def _side_by_side(answers: list[Answer]) -> Columns:
    width = max(30, console.width // 2 - 2)
    return Columns([answer.panel() for answer in answers], width=width, equal=True)


async def _follow(url: str | None, answer: Answer, prompt: str) -> None:
    body = {
        "model": answer.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    answer.started_ms = CLOCK.monotonic_ms()
    try:
        async with async_api(url, answer.key) as client:
            async for text in stream_text(client, body):
                if answer.first_ms is None:
                    answer.first_ms = CLOCK.monotonic_ms() - answer.started_ms
                answer.text += text
                answer.pieces += 1
    except StreamFailed as error:
        answer.problem = str(error)
    answer.done = True
