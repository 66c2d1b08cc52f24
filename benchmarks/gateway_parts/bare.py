"""The least that a gateway can do in this process model: what the platform's own work is beside.

    python -m benchmarks.gateway_parts.bare ipc://PATH HTTP_PORT

The same HTTP server, tokenizer and engine client as the api, and nothing else: no key, no check, no
limits, no ledger, no log line. It answers whole chat completions only.
"""

import itertools
import sys
from typing import Any

import msgspec
import uvicorn
import uvloop

from app.api_server import BoundedHeaders
from app.settings import packaged_base_model
from engine.client import EngineClient
from engine.text import TextCodec
from engine.types import GenerateRequest, SamplingParams


class BareGateway:
    """An ASGI application: `await open()` first."""

    def __init__(self, address: str) -> None:
        self._codec = TextCodec.load(packaged_base_model())
        self._client = EngineClient(address)
        self._numbers = itertools.count()

    async def open(self) -> None:
        await self._client.start()
        await self._client.describe()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        answer = await self._answer(msgspec.json.decode(body))
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, asked: dict[str, Any]) -> bytes:
        request = GenerateRequest(
            request_id=f"bare-{next(self._numbers)}",
            tenant="bare",
            prompt=self._codec.encode_chat(asked["messages"]),
            sampling=SamplingParams(max_tokens=asked["max_tokens"]),
            cache_salt="",
        )
        ids: list[int] = []
        async for output in self._client.generate(request):
            ids += output.token_ids
        message = {"role": "assistant", "content": self._codec.decode(ids)}
        return msgspec.json.encode({"choices": [{"index": 0, "message": message}]})


async def serve(address: str, port: int) -> None:
    gateway = BareGateway(address)
    await gateway.open()
    config = uvicorn.Config(
        gateway, host="127.0.0.1", port=port, http=BoundedHeaders, ws="none", lifespan="off",
        access_log=False, log_config=None, server_header=False,
    )  # fmt: skip
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
