"""A client that goes away frees its sequences, whatever they were doing."""

from __future__ import annotations

import asyncio
import json

import pytest

from .conftest import Served

_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


async def send(server: Served, body: dict):
    """Post over a raw socket; returns its two ends."""
    reader, writer = await asyncio.open_connection(*server.address)
    data = json.dumps(body).encode()
    writer.write(_HEAD % len(data) + data)
    await writer.drain()
    return reader, writer


async def until(condition) -> None:
    """Let the loop run until `condition()` holds; the test's timeout is the limit."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_frees_its_sequences_within_two_steps(server, stream, n, reset):
    server.engine.gate = asyncio.Semaphore(0)
    _, writer = await send(server, {"prompt": "a", "stream": stream, "n": n, "max_tokens": 99})
    await until(lambda: len(server.engine.added) == n)
    for _ in range(3 * n):
        server.engine.gate.release()
    await until(lambda: all(sequence.produced == 3 for sequence in server.engine.added))

    if reset:
        writer.transport.abort()
    else:
        writer.close()

    # No further step is needed at all: nothing is released to the gate.
    await until(lambda: len(server.engine.aborted) == n)
    assert all(sequence.produced == 3 for sequence in server.engine.added)
    assert server.engine.taken == 0
    assert await server.metric("lacunar_sequences_finished_total", reason="abort") == n
    await until(lambda: server.context.requests_open == 0)
    assert await server.metric("lacunar_requests_open") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(server, stream):
    server.engine.gate = asyncio.Semaphore(0)
    _, writer = await send(server, {"prompt": "a", "stream": stream})
    await until(lambda: len(server.engine.added) == 1)

    writer.close()

    await until(lambda: len(server.engine.aborted) == 1)
    assert server.engine.taken == 0


async def test_a_client_that_does_not_read_is_noticed_when_it_leaves(server, tokenizer):
    # Far more than the sockets' buffers take, so that the server waits in a write.
    server.engine.tokens = [10] * 2_000_000
    server.engine.info = type(server.engine.info)(
        **{f: getattr(server.engine.info, f) for f in server.engine.info.__struct_fields__}
        | {"max_model_len": 3_000_000, "num_kv_blocks": 200_000}
    )
    _, writer = await send(server, {"prompt": "a", "stream": True, "max_tokens": 2_000_000})
    await until(lambda: server.engine.added and server.engine.added[0].produced > 100)
    # An unhindered sequence takes a step in every turn of the loop.
    before = -1
    while before != server.engine.added[0].produced:
        before = server.engine.added[0].produced
        for _ in range(100):
            await asyncio.sleep(0)

    writer.transport.abort()

    await until(lambda: len(server.engine.aborted) == 1)
    assert server.engine.taken == 0


async def test_others_are_not_touched(server, client):
    server.engine.gate = asyncio.Semaphore(0)
    _, leaving = await send(server, {"prompt": "a", "stream": True})
    staying = asyncio.create_task(client.post("/v1/completions", json={"prompt": "b", "max_tokens": 64}))
    await until(lambda: len(server.engine.added) == 2)

    leaving.close()
    await until(lambda: len(server.engine.aborted) == 1)
    for _ in range(100):
        server.engine.gate.release()

    assert (await staying).json()["choices"][0]["text"] == "one two three four five"


async def test_a_body_that_never_comes_reaches_no_engine(server, caplog):
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(_HEAD % 50 + b"{")
    await until(lambda: server.context.requests_open == 1)
    writer.close()
    await until(lambda: server.context.requests_open == 0)

    assert server.engine.added == []
    # The client's doing: no 500, and no traceback in the log.
    route = {"route": "/v1/completions", "method": "POST"}
    assert await server.metric("lacunar_http_requests_total", **route, status="499") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    reader.feed_eof()


async def test_two_requests_on_one_connection(server):
    reader, writer = await send(server, {"prompt": "a", "max_tokens": 64})
    first = await reader.readuntil(b"}}}")
    data = json.dumps({"prompt": "b", "max_tokens": 64}).encode()
    writer.write(_HEAD % len(data) + data)
    second = await reader.readuntil(b"}}}")
    writer.close()

    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")
