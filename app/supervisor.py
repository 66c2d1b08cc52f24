"""`loramux serve`: migrate, then engine, worker, beat and api as children that are kept running.

A child that ends is started again after a pause that doubles; one that hangs is killed first. An
engine hangs when it beats but its step loop stands still in the middle of work, or when it gives
no sign of life at all; an api when /healthz does not answer; worker and beat when the file that
their loop touches grows old. How long each may hang is a setting.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from app.children import Backoff, Child, Say
from app.clock import Clock, SystemClock
from app.platform import open_platform
from app.processes import (
    ProcessCommand,
    api_command,
    beat_command,
    beat_sign,
    engine_command,
    local_engines,
    migrate_command,
    worker_command,
    worker_sign,
)
from app.settings import Settings
from app.users.service import ensure_operator
from engine.client import ClientTimes, EngineClient

API_START_S = 60.0
SIGN_START_S = 300.0
"""How long a worker or beat may take to its first sign of life; one waits so for its broker."""
GRACE_S = 30.0
"""How long the children get to end after SIGTERM before they are killed."""
MORE_THAN_THE_DRAIN_S = 10.0
TRIES_BEFORE_READY = 5
COULD_NOT_START = 2
"""A child's exit status when starting it again would change nothing."""
_PROBE_S = 0.5

Probe = Callable[["Kept"], Awaitable[str]]
"""Watches one life of a child and returns why it must end; sets `ready` when it serves."""


class CannotStart(Exception):
    """A child never came up; its own words are in the log above."""


@dataclass
class Kept:
    """One process that is kept running. The platform comes up without one that is `optional`."""

    command: ProcessCommand
    probe: Probe | None = None
    optional: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    child: Child | None = None
    restarts: int = 0

    @property
    def name(self) -> str:
        return self.command.name


class Supervisor:
    """Keeps processes running until `stop`."""

    def __init__(
        self,
        kept: Sequence[Kept],
        say: Say,
        clock: Clock | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self.kept = kept
        self._grace_s = grace_s
        self._say = say
        self._clock = clock or SystemClock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Starts everything and returns after `stop`. Raises CannotStart; nothing is left then."""
        keepers = [asyncio.create_task(self._keep(kept), name=kept.name) for kept in self.kept]
        stop = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stop.cancel()
            self._stopping.set()
            await self._end(keepers)

    def stop(self) -> None:
        """Lets every child end in its own way."""
        self._stopping.set()

    async def _keep(self, kept: Kept) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            started_ms = self._clock.monotonic_ms()
            kept.child = await Child.start(kept.command, self._say)
            if kept.probe is None or kept.optional:
                kept.ready.set()
            status, why = await self._one_life(kept, kept.child)
            if self._stopping.is_set():
                return
            pause_s = backoff.after((self._clock.monotonic_ms() - started_ms) / 1000)
            never_ready = not kept.ready.is_set()
            if never_ready and (
                status == COULD_NOT_START or backoff.failures >= TRIES_BEFORE_READY
            ):
                raise CannotStart(f"{kept.name} could not start ({why})")
            kept.restarts += 1
            self._say("serve", f"{kept.name} {why}; it is started again in {pause_s:g} s")
            await self._pause(pause_s)

    async def _one_life(self, kept: Kept, child: Child) -> tuple[int, str]:
        """Until the child ends by itself or its probe says that it must."""
        ending = asyncio.create_task(child.wait())
        probing = asyncio.ensure_future(kept.probe(kept)) if kept.probe is not None else None
        watched = [ending] if probing is None else [ending, probing]
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done() and probing is not None:
                why = probing.result()
                child.kill()
                return await ending, why
            status = await ending
            return status, f"ended with {_in_words(status)}"
        finally:
            if probing is not None:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """api first, so that nothing new comes in; the engine last, so that answers can end."""
        running = [task for task in keepers if not task.done()]
        for kept in reversed(self.kept):
            if kept.child is not None:
                kept.child.terminate()
        if running:
            _, late = await asyncio.wait(running, timeout=self._grace_s)
            for kept in self.kept:
                if kept.child is not None and late:
                    kept.child.kill()
        await asyncio.gather(*keepers, return_exceptions=True)


def _in_words(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


# --------------------------------------------------------------------------- probes


def engine_probe(address: str, clock: Clock, *, hang_s: float, start_s: float) -> Probe:
    """Listens to the engine's beat."""

    async def watch(kept: Kept) -> str:
        times = ClientTimes(dead_after_s=hang_s, hung_after_s=hang_s)
        client = EngineClient(address, times=times)
        await client.start()
        heard_ms = clock.monotonic_ms()
        was_ready = False
        try:
            while True:
                await asyncio.sleep(_PROBE_S)
                if client.hung:
                    return "hangs in a step"
                if client.alive or client.draining:
                    heard_ms, was_ready = clock.monotonic_ms(), True
                    kept.ready.set()
                silent_s = (clock.monotonic_ms() - heard_ms) / 1000
                if silent_s > (hang_s if was_ready else start_s):
                    return "gives no sign of life" if was_ready else "takes too long to load"
        finally:
            await client.close()

    return watch


def api_probe(url: str, clock: Clock, *, hang_s: float, start_s: float = API_START_S) -> Probe:
    """Asks /healthz. `url` is the api's own, without a proxy."""

    async def watch(kept: Kept) -> str:
        heard_ms = clock.monotonic_ms()
        was_ready = False
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            while True:
                await asyncio.sleep(_PROBE_S if not was_ready else 2.0)
                if await _answers(http, f"{url}/healthz"):
                    heard_ms, was_ready = clock.monotonic_ms(), True
                    kept.ready.set()
                if (clock.monotonic_ms() - heard_ms) / 1000 > (hang_s if was_ready else start_s):
                    return "does not answer"

    return watch


def sign_probe(sign: Path, clock: Clock, *, hang_s: float, start_s: float = SIGN_START_S) -> Probe:
    """Looks at the file that the process touches while its loop turns."""

    async def watch(kept: Kept) -> str:
        started = clock.now().timestamp()
        while True:
            await asyncio.sleep(_PROBE_S)
            touched = _touched(sign)
            was_alive = touched >= started
            if was_alive:
                kept.ready.set()
            silent_s = clock.now().timestamp() - max(touched, started)
            if silent_s > (hang_s if was_alive else start_s):
                return "gives no sign of life"

    return watch


def _touched(sign: Path) -> float:
    """Unix seconds; 0 for a file that is not there."""
    try:
        return sign.stat().st_mtime
    except FileNotFoundError:
        return 0.0


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


# --------------------------------------------------------------------------- serve


def api_url(settings: Settings) -> str:
    """Where the api is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def platform_processes(settings: Settings, clock: Clock) -> list[Kept]:
    """What `serve` keeps running, in the order in which it is started."""
    engines = [
        Kept(
            engine_command(settings, address),
            engine_probe(
                address, clock, hang_s=settings.engine_hang_s, start_s=settings.engine_start_s
            ),
        )
        for address in local_engines(settings)
    ]
    signs = {
        worker_command: sign_probe(worker_sign(settings), clock, hang_s=settings.worker_hang_s),
        beat_command: sign_probe(beat_sign(settings), clock, hang_s=settings.beat_hang_s),
    }
    return [
        *engines,
        *(Kept(command(settings), probe, optional=True) for command, probe in signs.items()),
        Kept(
            api_command(settings),
            api_probe(api_url(settings), clock, hang_s=settings.api_hang_s),
        ),
    ]


async def serve(settings: Settings, say: Say | None = None) -> None:
    """Runs the platform until SIGTERM or SIGINT. Raises CannotStart with what to do."""
    say = say or _print_line
    clock = SystemClock()
    _check_port(settings)
    await _migrate(settings, say)
    first = await _first_operator(settings)
    grace_s = settings.drain_notice_s + settings.drain_grace_s + MORE_THAN_THE_DRAIN_S
    supervisor = Supervisor(platform_processes(settings, clock), say, clock, grace_s=grace_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    greeting = asyncio.create_task(_greet(settings, supervisor, say, first))
    try:
        await supervisor.run()
    finally:
        greeting.cancel()
        await asyncio.gather(greeting, return_exceptions=True)
        say("serve", "stopped")


def _check_port(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose "
                "another port with --port"
            ) from None


async def _migrate(settings: Settings, say: Say) -> None:
    child = await Child.start(migrate_command(settings), say)
    status = await child.wait()
    if status != 0:
        raise CannotStart(f"the database could not be migrated ({_in_words(status)})")


async def _first_operator(settings: Settings) -> tuple[str, str] | None:
    """Name and one-time password of the operator, on the first start alone."""
    platform = open_platform(settings)
    try:
        async with platform.db.transaction() as session:
            return await ensure_operator(
                session, passwords=platform.passwords, now=platform.clock.now()
            )
    finally:
        await platform.close()


async def _greet(
    settings: Settings, supervisor: Supervisor, say: Say, first: tuple[str, str] | None
) -> None:
    """Says where the console is, once everything serves."""
    for kept in supervisor.kept:
        await kept.ready.wait()
        if kept.probe is not None and not kept.optional:
            say("serve", f"{kept.name} is ready")
    say("serve", f"console  {settings.public_url}/console")
    say("serve", f"API      {settings.public_url}/v1")
    if first is not None:
        name, password = first
        say("serve", f"first start: sign in as {name!r} with the one-time password {password}")


def _print_line(name: str, line: str) -> None:
    sys.stdout.write(f"{name:<7}| {line}\n")
    sys.stdout.flush()
