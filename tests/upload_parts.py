"""What tests of resumable uploads share: an upload in parts, as a client sends it."""

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

import httpx

from app.keys.service import NewKey
from tests.adapter_files import AdapterFiles
from tests.factories import bearer


def content_digest(data: bytes) -> str:
    """RFC 9530."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


@dataclass
class PartedUpload:
    """One upload and the client that sends it; `id` once it is begun."""

    client: httpx.AsyncClient
    key: NewKey
    files: AdapterFiles
    name: str = "a"
    id: str = ""
    part_bytes: int = 0

    async def begin(self, **changes: Any) -> httpx.Response:
        body = {
            "name": self.name,
            "config_bytes": len(self.files.config or b""),
            "weights_bytes": len(self.files.weights or b""),
        }
        response = await self.client.post(
            "/v1/uploads", json=body | changes, headers=bearer(self.key)
        )
        if response.status_code == 201:
            self.id, self.part_bytes = response.json()["id"], response.json()["part_bytes"]
        return response

    @property
    def parts(self) -> list[bytes]:
        """Part 0 and the parts of the weights."""
        weights, size = self.files.weights or b"", self.part_bytes
        return [
            self.files.config or b"",
            *(weights[at : at + size] for at in range(0, len(weights), size)),
        ]

    async def put(self, number: int, data: bytes | None = None, **headers: str) -> httpx.Response:
        return await self.client.put(
            f"/v1/uploads/{self.id}/parts/{number}",
            content=self.parts[number] if data is None else data,
            headers=bearer(self.key) | headers,
        )

    async def put_all(self) -> None:
        for number in range(len(self.parts)):
            response = await self.put(number)
            assert response.status_code == 200, response.text

    async def get(self) -> httpx.Response:
        return await self.client.get(f"/v1/uploads/{self.id}", headers=bearer(self.key))

    async def complete(self) -> httpx.Response:
        return await self.client.post(f"/v1/uploads/{self.id}/complete", headers=bearer(self.key))

    async def delete(self) -> httpx.Response:
        return await self.client.delete(f"/v1/uploads/{self.id}", headers=bearer(self.key))


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and param of a refusal."""
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]
