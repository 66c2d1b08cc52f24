"""Receiving an upload: parts stream into the store's staging while they are hashed.

Nothing is held in memory but the config; a client that goes away leaves nothing but staging.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from app.adapters import intake, sweeps
from app.adapters.multipart import PartBegin, PartData, PartEnd, boundary_of, read_parts
from app.adapters.names import adapter_name, clip
from app.adapters.resources import Resources, storing
from app.adapters.schemas import VersionObject
from app.adapters.service import require_writer
from app.caller import Caller
from app.errors import InvalidRequest, RateLimited, TooLarge
from engine.adapters.config import rank_beyond
from engine.adapters.store import Staging

NAME_PART = "name"
CONFIG_PART = "adapter_config.json"
WEIGHTS_PART = "adapter_model.safetensors"
PARTS = (NAME_PART, CONFIG_PART, WEIGHTS_PART)
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.pkl")

MAX_NAME_BYTES = 256
MAX_CONFIG_BYTES = 256 * 1024
FRAMING_BYTES = 16 * 1024
WRITE_BYTES = 1024 * 1024
"""Bytes of weights that are gathered before a thread writes them."""
MAX_UPLOADS_PER_TENANT = 4
"""Uploads that one api process receives at a time from one tenant."""
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Received:
    """`created`: the version is new, or a failed one was queued again; else it was here before."""

    version: VersionObject
    created: bool


class UploadGate:
    """Bounds the uploads of one tenant that are under way in this process."""

    def __init__(self, limit: int = MAX_UPLOADS_PER_TENANT) -> None:
        self._limit = limit
        self._under_way: dict[str, int] = {}

    @contextmanager
    def enter(self, tenant_id: str) -> Iterator[None]:
        count = self._under_way.get(tenant_id, 0)
        if count >= self._limit:
            raise RateLimited(
                f"{count} uploads of this tenant are under way; wait for one to end.",
                code="too_many_uploads",
                retry_after_ms=5000,
            )
        self._under_way[tenant_id] = count + 1
        try:
            yield
        finally:
            self._under_way[tenant_id] -= 1
            if not self._under_way[tenant_id]:
                del self._under_way[tenant_id]


async def receive(
    resources: Resources,
    gate: UploadGate,
    caller: Caller,
    stream: AsyncIterator[bytes],
    *,
    content_type: str,
    content_length: int | None = None,
    idempotency_key: str | None = None,
) -> Received:
    """Takes one multipart body and queues its validation; see the API's POST /v1/adapters."""
    require_writer(caller)
    boundary = boundary_of(content_type)
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= MAX_KEY_CHARS:
        raise InvalidRequest(
            f"Idempotency-Key has 1 to {MAX_KEY_CHARS} characters.", param="Idempotency-Key"
        )
    limit = resources.settings.max_adapter_bytes
    if content_length is not None:
        if content_length > limit + FRAMING_BYTES:
            raise too_large(limit)
        async with resources.db.reading() as session:
            more = content_length - FRAMING_BYTES
            await intake.check_stored(session, caller, more, resources.clock.now())
    with gate.enter(caller.tenant_id), storing():
        staging = await asyncio.to_thread(resources.store.stage)
        try:
            form = _Form(staging, limit, caller.limits.max_rank)
            async with aclosing(read_parts(stream, boundary)) as events:
                async for event in events:
                    await form.take(event)
            name = form.finished_name()
            arrived = intake.Arrived(name, form.config_bytes, form.weights_bytes)
            await asyncio.to_thread(staging.prepare)
            received, run_id = await _keep(resources, caller, arrived, staging, idempotency_key)
        finally:
            await asyncio.to_thread(staging.abort)  # once it is committed, nothing is left
    if run_id is not None:
        await sweeps.send(resources, run_id, received.version.id)
    return received


# --------------------------------------------------------------------------- the parts


class _Form:
    """Takes the parts as they come; refuses what is unknown, double, missing or too large."""

    def __init__(self, staging: Staging, limit: int, max_rank: int) -> None:
        self._staging = staging
        self._limit = limit
        self._max_rank = max_rank
        self._seen: set[str] = set()
        self._part = ""
        self._small = bytearray()  # the name or the config
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._name: bytes | None = None
        self.config_bytes = 0
        self.weights_bytes = 0

    async def take(self, event: PartBegin | PartData | PartEnd) -> None:
        if isinstance(event, PartBegin):
            self._begin(event.name)
        elif isinstance(event, PartEnd):
            await self._end()
        elif self._part == WEIGHTS_PART:
            await self._weights(event.data)
        else:
            self._gather(event.data)

    def _begin(self, name: str) -> None:
        if name not in PARTS:
            raise _unknown_part(name)
        if name in self._seen:
            raise InvalidRequest(
                f"the part {name} comes twice; send it once", code="duplicate_part", param=name
            )
        self._seen.add(name)
        self._part = name

    def _gather(self, data: bytes) -> None:
        most = MAX_NAME_BYTES if self._part == NAME_PART else MAX_CONFIG_BYTES
        if len(self._small) + len(data) > most:
            if self._part == NAME_PART:
                raise TooLarge(
                    f"the part name is larger than {most} bytes; an adapter's name has at most 63 "
                    "characters",
                    code="name_too_long",
                    param=NAME_PART,
                )
            raise config_too_large(CONFIG_PART)
        self._small += data

    async def _weights(self, data: bytes) -> None:
        self.weights_bytes += len(data)
        self._check_size()
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= WRITE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending, self._pending_bytes = [], 0
            await asyncio.to_thread(self._staging.write_weights, data)

    async def _end(self) -> None:
        content = bytes(self._small)
        self._small.clear()
        if self._part == NAME_PART:
            self._name = content
        elif self._part == CONFIG_PART:
            self.config_bytes = len(content)
            self._check_size()
            check_ranks(content, self._max_rank)
            await asyncio.to_thread(self._staging.write_config, content)
        else:
            await self._flush()

    def _check_size(self) -> None:
        if self.config_bytes + self.weights_bytes > self._limit:
            raise too_large(self._limit)

    def finished_name(self) -> str:
        """The adapter's name, once all parts are there."""
        for part in PARTS:
            if part not in self._seen:
                raise InvalidRequest(
                    f"the part {part} is missing; send {', '.join(PARTS)}",
                    code="missing_part",
                    param=part,
                )
        for part, size in ((CONFIG_PART, self.config_bytes), (WEIGHTS_PART, self.weights_bytes)):
            if size == 0:
                raise InvalidRequest(
                    f"the part {part} is empty; send the file that PEFT's save_pretrained wrote",
                    code="empty_part",
                    param=part,
                )
        return adapter_name((self._name or b"").decode("utf-8", "replace"))


def _unknown_part(name: str) -> InvalidRequest:
    if name in PICKLES:
        return InvalidRequest(
            f"{name} is a pickle, which is never opened; save the adapter as safetensors "
            f"(save_pretrained(..., safe_serialization=True)) and send {WEIGHTS_PART}",
            code="pickle_file",
            param=name,
        )
    return InvalidRequest(
        f"the part {clip(name)!r} is not known; send {', '.join(PARTS)}",
        code="unknown_part",
        param=clip(name),
    )


def check_ranks(config: bytes, max_rank: int) -> None:
    """Raises InvalidRequest for a rank that validation would refuse: nothing else need be sent."""
    found = rank_beyond(config, max_rank)
    if found is not None:
        raise InvalidRequest(f"{CONFIG_PART}: {found.message}", code=found.code, param=found.field)


def config_too_large(param: str) -> TooLarge:
    return TooLarge(
        f"{CONFIG_PART} may have {MAX_CONFIG_BYTES} bytes, and PEFT's own has a few thousand; send "
        "the file that save_pretrained wrote",
        code="config_too_large",
        param=param,
    )


def too_large(limit: int, param: str = WEIGHTS_PART) -> TooLarge:
    """Both files together are larger than this server accepts."""
    return TooLarge(
        f"an adapter may have {limit} bytes in both files together; save it as bf16 or lower its "
        "rank",
        code="adapter_too_large",
        param=param,
    )


# --------------------------------------------------------------------------- keeping it


async def _keep(
    resources: Resources,
    caller: Caller,
    arrived: intake.Arrived,
    staging: Staging,
    idempotency_key: str | None,
) -> tuple[Received, str | None]:
    """Commits the files and their rows; also the id of the run to send, if one is to be sent."""
    async with resources.db.transaction() as session:
        await intake.lock_living_tenant(session, caller)
        fingerprint = intake.fingerprint(arrived.name, staging.digest)
        earlier = await intake.seen_key(session, caller, fingerprint, idempotency_key)
        if earlier is not None:
            return Received(earlier, created=False), None
        kept = await intake.keep(resources, session, caller, arrived, staging)
        if idempotency_key is not None:
            intake.remember_key(resources, session, caller, kept, fingerprint, idempotency_key)
        view = await intake.view(session, kept)
    return Received(view, created=kept.run is not None), None if kept.run is None else kept.run.id
