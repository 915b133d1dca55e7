"""Health, drain, the engine's death, ids and keys."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from service.api.server import bind, serve_context
from service.engine.protocol import BUILD_FACTS
from service.errors import SettingsError

from .conftest import sse
from .test_disconnects import until


async def test_health_is_good_while_the_engine_lives(client):
    for path in ("/livez", "/readyz"):
        response = await client.get(path)
        assert response.status_code == 200
        assert response.json() == {"status": "ok"}


async def test_a_silent_engine_fails_liveness(serve):
    async with serve(stall_seconds=5) as server, httpx.AsyncClient(base_url=server.url) as client:
        server.engine.last_heard -= 6
        response = await client.get("/livez")

        assert response.status_code == 503
        assert "silent" in response.json()["reason"]


async def test_stopping_finishes_open_requests_and_refuses_new_ones(serve):
    async with serve() as server, httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        server.engine.gate = asyncio.Semaphore(0)
        request = {"prompt": "a", "max_tokens": 64}
        stream = asyncio.create_task(client.post("/v1/completions", json={**request, "stream": True}))
        plain = asyncio.create_task(client.post("/v1/completions", json=request))
        await until(lambda: len(server.engine.added) == 2)

        server.stop.set()
        await until(lambda: server.context.draining)
        refused = await client.post("/v1/completions", json=request)
        ready, alive = await client.get("/readyz"), await client.get("/livez")
        for _ in range(100):
            server.engine.gate.release()

        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        assert ready.status_code == 503
        assert alive.status_code == 200
        assert sse((await stream).text)[-1] == "[DONE]"
        assert (await plain).json()["choices"][0]["text"] == "one two three four five"
        assert await server.task == 0
        assert server.engine.aborted == []


async def test_a_drain_ends_at_its_limit(serve):
    async with (
        serve(drain_seconds=0.05) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20) as client,
    ):
        server.engine.gate = asyncio.Semaphore(3)
        stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        await until(lambda: server.engine.added and server.engine.added[0].produced == 3)
        plain = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await until(lambda: len(server.engine.added) == 2)

        server.stop.set()

        events = sse((await stream).text)
        assert events[-1]["error"]["code"] == "engine_unavailable"
        assert (await plain).status_code == 503
        assert await server.task == 0


async def test_a_second_signal_does_not_wait(serve):
    async with (
        serve(drain_seconds=600) as server,
        httpx.AsyncClient(base_url=server.url, timeout=20) as client,
    ):
        server.engine.gate = asyncio.Semaphore(0)
        plain = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await until(lambda: len(server.engine.added) == 1)

        server.stop.set()
        await until(lambda: server.context.draining)
        server.hurry.set()

        assert (await plain).status_code == 503
        assert await server.task == 0


async def test_the_engines_death_is_told_to_everyone_and_ends_the_server(serve):
    async with serve() as server, httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        server.engine.gate = asyncio.Semaphore(3)
        stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        await until(lambda: server.engine.added and server.engine.added[0].produced == 3)
        plain = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await until(lambda: len(server.engine.added) == 2)

        server.engine.die("KeyError: /secret/path")

        answer = await plain
        events = sse((await stream).text)
        assert answer.status_code == 503
        assert events[-1]["error"]["code"] == "engine_unavailable"
        assert "secret" not in answer.text + str(events)
        assert answer.headers["x-request-id"]
        assert await server.task == 1


async def test_a_dead_engine_fails_liveness_and_new_requests(server, client):
    server.engine.failure = "gone"

    assert (await client.get("/livez")).status_code == 503
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
    assert (await client.get("/metrics")).status_code == 200
    assert await server.metric("lacunar_engine_up") == 0


async def test_an_invalid_request_is_told_so_even_while_draining(server, client):
    server.context.draining = True

    assert (await client.post("/v1/completions", json={"prompt": ""})).status_code == 400


@pytest.mark.parametrize("given", ["abc-123", "A.b:c_d"])
async def test_a_request_id_is_honoured(client, given):
    assert (await client.get("/livez", headers={"X-Request-Id": given})).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "a/../b"])
async def test_a_request_id_that_does_not_belong_in_a_log_is_replaced(client, given):
    returned = (await client.get("/livez", headers={"X-Request-Id": given})).headers["x-request-id"]

    assert returned != given
    assert returned.isalnum()


async def test_with_a_key_only_health_and_metrics_are_open(serve):
    async with serve(api_key="s3cret") as server, httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/version", "/openapi.json", "/nothing"):
            assert (await client.get(path)).status_code == 401
        for key in ("wrong", "s3cret2", "s3cre", "S3CRET"):
            refused = await client.post(
                "/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {key}"}
            )
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        good = await client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer s3cret"}
        )
        assert good.status_code == 200
        assert await server.metric("lacunar_rejections_total", reason="unauthorized") == 8


async def test_models_and_version_describe_the_server(client):
    models = (await client.get("/v1/models")).json()
    version = (await client.get("/version")).json()

    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 256
    assert (await client.get("/v1/models/tiny")).json() == models["data"][0]
    assert version["architecture"] == "FakeForCausalLM"
    assert set(version["build"]) == set(BUILD_FACTS)
    assert version["build"]["cpu_isa"] == "generic"


async def test_the_openapi_document_describes_the_bodies(client):
    document = (await client.get("/openapi.json")).json()

    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["prompt"]
    assert "temperature" in schema["properties"]


@pytest.mark.parametrize(
    ("path", "types"),
    [
        ("/v1/completions", {"application/json", "text/event-stream"}),
        ("/v1/chat/completions", {"application/json", "text/event-stream"}),
        ("/tokenize", {"application/json"}),
    ],
)
async def test_the_openapi_document_names_every_type_of_an_answer(client, path, types):
    document = (await client.get("/openapi.json")).json()

    answers = document["paths"][path]["post"]["responses"]
    assert answers["200"]["content"].keys() == types
    assert "$ref" in answers["200"]["content"]["application/json"]["schema"]
    assert answers["default"]["content"].keys() == {"application/json"}


async def test_a_taken_port_is_a_clear_error(server):
    host, port = server.address

    with pytest.raises(SettingsError, match=f"{port}.*--port"):
        bind(host, port)


async def test_a_port_that_another_server_takes_while_this_one_loads_is_a_clear_error(server):
    first, second = bind("127.0.0.1", 0), None
    try:
        second = bind(*first.getsockname())
        first.listen()
        with pytest.raises(SettingsError, match="Choose another port"):
            await serve_context(server.context, second, stop=asyncio.Event(), hurry=asyncio.Event())
    finally:
        first.close()
        if second is not None:
            second.close()


async def test_a_host_that_is_none_of_ours_is_a_clear_error():
    with pytest.raises(SettingsError, match=r"203\.0\.113\.1"):
        bind("203.0.113.1", 0)
