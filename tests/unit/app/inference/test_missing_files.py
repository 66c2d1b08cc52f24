"""An adapter whose files are gone from the store: 503 for its caller, counted for the operator."""

import httpx
import pytest

from app.metrics import REFUSALS
from app.platform import Platform
from app.tenants.models import Tenant
from engine.errors import AdapterCorrupt, AdapterMissing, EngineError
from tests.fake_engine import FakeEngine
from tests.serving import make_ready_adapter


def counted(code: str) -> float:
    return float(REFUSALS.labels(code)._value.get())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error", [AdapterMissing("its files are gone"), AdapterCorrupt("it hashes to another digest")]
)
async def test_the_call_is_a_503_that_says_so_and_is_counted(
    api: httpx.AsyncClient,
    engine: FakeEngine,
    platform: Platform,
    tenant: Tenant,
    error: EngineError,
    stream: bool,
) -> None:
    await make_ready_adapter(platform, tenant, "cold")
    engine.refuse = error
    before = counted(error.code)
    answer = await api.post(
        "/v1/chat/completions",
        json={
            "model": "cold",
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": stream,
        },
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, error.code)
    assert int(answer.headers["retry-after"]) >= 1
    assert counted(error.code) == before + 1
