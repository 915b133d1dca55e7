"""What a client may not do: endless heads, bodies that never come, answers without end, too many sockets."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from service.api import protocol

from .conftest import sse


async def connect(server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.address)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict]:
    """Status and JSON body of one answer; the connection is closed after it."""
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("parts", [1, 50])
async def test_a_head_over_the_limit_is_a_431(serve, parts):
    """In one packet or many, ended or not: what comes after the limit does not cost the client its answer."""
    async with serve(max_header_bytes=2000) as server:
        reader, writer = await connect(server)
        lines = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 90) for i in range(50))
        head = b"GET /livez HTTP/1.1\r\nHost: x\r\n" + lines
        size = -(-len(head) // parts)
        for start in range(0, len(head), size):
            writer.write(head[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        if parts == 1:
            writer.write(b"\r\n")
        status, body = await read_answer(reader)

        assert status == 431
        assert "2000 bytes" in body["error"]["message"]
        writer.close()
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/livez", headers={"X-Long": "a" * 1500})).status_code == 200


async def test_a_refused_client_that_goes_on_sending_reads_its_answer(serve):
    """A connection closed over unread bytes is reset, and the reset may overtake the answer."""
    async with serve(max_header_bytes=2000) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /livez HTTP/1.1\r\nX: " + b"a" * 4000)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)  # refused by now
        for _ in range(20):
            writer.write(b"a" * 50_000)
            await writer.drain()
        body = await asyncio.wait_for(reader.read(), 20)

        assert "2000 bytes" in json.loads(body)["error"]["message"]
        writer.close()


async def test_a_refused_client_that_stays_is_closed(serve, monkeypatch):
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 0.05)
    async with serve(max_header_bytes=2000) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /livez HTTP/1.1\r\nX: " + b"a" * 4000)
        await read_answer(reader)  # the server has ended its side

        async def send_for_ever() -> None:
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.01)

        with pytest.raises(ConnectionError):  # once the server has closed its side too
            await asyncio.wait_for(send_for_ever(), 20)


async def test_a_large_body_is_no_large_head(serve):
    async with serve(max_header_bytes=2000) as server, httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(2):
            body = {"prompt": "a", "user": "x" * 500_000}
            assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_what_is_no_http_is_a_400_in_openais_shape(server):
    reader, writer = await connect(server)
    writer.write(b"hello there\r\n\r\n")
    status, body = await read_answer(reader)

    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    writer.close()


async def test_a_head_that_does_not_end_is_a_408(server, monkeypatch):
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.05)
    reader, writer = await connect(server)
    writer.write(b"GET /livez HTTP/1.1\r\nHost:")
    status, body = await read_answer(reader)

    assert status == 408
    assert "headers" in body["error"]["message"]
    writer.close()


async def test_a_connection_that_says_nothing_is_closed(serve):
    async with serve(keep_alive_seconds=1) as server:
        reader, writer = await connect(server)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_a_body_that_does_not_come_in_time_is_a_408(serve):
    async with serve(body_seconds=0.05) as server:
        reader, writer = await connect(server)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )
        status, body = await read_answer(reader)

        assert status == 408
        assert body["error"]["code"] == "body_timeout"
        assert await server.metric("lacunar_rejections_total", reason="body_timeout") == 1
        assert server.engine.added == []
        writer.close()


async def test_an_answer_that_takes_too_long_is_a_504_and_frees_its_sequence(serve):
    async with serve(request_seconds=0.1) as server:
        server.engine.gate = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v1/completions", json={"prompt": "a"})

        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
        assert server.engine.taken == 0


async def test_a_stream_that_takes_too_long_ends_with_an_error(serve):
    async with serve(request_seconds=0.3) as server:
        server.engine.gate = asyncio.Semaphore(2)
        async with httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})

        events = sse(response.text)
        assert events[0]["choices"][0]["text"] == "one"
        assert events[-1]["error"]["code"] == "request_timeout"
        assert server.engine.taken == 0


async def test_a_stream_that_nobody_reads_is_cut_off(serve, tokenizer):
    """The error cannot be delivered either; the connection must not stay."""
    async with serve(request_seconds=0.5, context_tokens=4_000_000) as server:
        server.engine.tokens = tokenizer.encode("word " * 400_000, add_special_tokens=False)
        _, writer = await connect(server)
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 3_000_000}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await asyncio.wait_for(server.engine.abort_seen.wait(), 20)
        await asyncio.wait_for(server.context.wait_until_idle(), 20)
        assert server.engine.taken == 0
        writer.close()


async def test_connections_over_the_limit_are_closed(serve):
    async with serve(max_connections=2) as server:
        held = [await connect(server) for _ in range(2)]
        for _, writer in held:  # both are known to the server once it has answered
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, _ in held:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        reader, writer = await connect(server)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        for _, open_writer in held:
            open_writer.close()
        writer.close()


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 4, "max_tokens": 30}, "n"), ({"max_tokens": 101}, "max_tokens")]
)
async def test_the_tokens_of_all_choices_together_are_bounded(serve, fields, param):
    async with serve(max_request_tokens=100) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v1/completions", json={"prompt": "a", **fields})
            assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})).is_success

        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "at most 100" in response.json()["error"]["message"]


async def test_more_messages_than_the_context_has_tokens_are_refused_unrendered(client, server, monkeypatch):
    """A template takes seconds for a hundred thousand of them."""
    monkeypatch.setattr(
        server.context.tokenizer, "apply_chat_template", lambda *_, **__: pytest.fail("rendered")
    )
    messages = [{"role": "user", "content": ""}] * 257
    response = await client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "257 messages" in response.json()["error"]["message"]
