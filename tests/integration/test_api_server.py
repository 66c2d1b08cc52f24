"""The HTTP server's own limits, on a socket."""

import asyncio

import pytest
import uvicorn

from app.api_server import MAX_HEADER_BYTES, BoundedHeaders, server_options


async def application(scope, receive, send):
    """Reads the body and answers with its size."""
    assert scope["type"] == "http"
    size = 0
    while True:
        event = await receive()
        size += len(event.get("body", b""))
        if not event.get("more_body"):
            break
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port(settings):
    options = server_options(settings) | {"port": 0, "lifespan": "off"}

    class Impatient(BoundedHeaders):
        header_timeout_s = 0.3

    server = uvicorn.Server(uvicorn.Config(application, **options | {"http": Impatient}))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    await server.shutdown()


async def closed_by_the_server(reader):
    return await reader.read() == b""


async def answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head.split(b"\r\n")[0], await reader.readexactly(length)


class TestHeaders:
    async def test_a_client_that_says_nothing_is_cut_off(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await closed_by_the_server(reader)
        writer.close()

    async def test_headers_that_trickle_in_are_cut_off(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ")
        assert await closed_by_the_server(reader)
        writer.close()

    async def test_headers_without_end_are_cut_off(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
        try:
            for _ in range(MAX_HEADER_BYTES // 4000 + 2):
                writer.write(b"x-more: " + b"y" * 4000 + b"\r\n")
                await writer.drain()
            assert await closed_by_the_server(reader)
        except ConnectionError:
            return
        finally:
            writer.close()

    async def test_a_slow_body_is_not_the_headers_business(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(0.6)
        writer.write(b"cd")
        assert await answer(reader) == (b"HTTP/1.1 200 OK", b"4")
        writer.close()

    async def test_a_large_body_behind_small_headers_is_fine(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = 3 * MAX_HEADER_BYTES
        head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        writer.write(head.encode() + b"z" * size)
        assert await answer(reader) == (b"HTTP/1.1 200 OK", str(size).encode())
        writer.close()

    async def test_the_second_request_of_a_connection_has_the_same_limit(self, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ")
        assert await closed_by_the_server(reader)
        writer.close()


def test_the_settings_time_out_reaches_the_server(settings):
    assert server_options(settings)["http"].header_timeout_s == settings.header_timeout_s
