"""The page at / and its data, and vLLM's metric names."""

from __future__ import annotations

import re

import httpx
from prometheus_client.parser import text_string_to_metric_families


async def test_the_page_loads_nothing_from_elsewhere(client):
    response = await client.get("/")

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|//\w|\bsrc=|<link|@import", response.text)


async def test_its_labels_belong_to_fields(client):
    text = (await client.get("/")).text

    fields = set(re.findall(r'<(?:input|textarea) id="(\w+)"', text))
    assert fields
    assert fields == set(re.findall(r'<label for="(\w+)"', text))


async def test_the_data_names_the_model_and_its_layers(client, server):
    status = (await client.get("/status.json")).json()

    info = server.engine.info
    assert status["architecture"] == info.architecture
    assert status["problem"] is None
    assert sum(layer["count"] for layer in status["layers"]) == len(info.layers)
    assert sum(layer["stored_bytes"] for layer in status["layers"]) == sum(
        x.stored_bytes for x in info.layers
    )


async def test_it_can_be_switched_off(serve):
    async with serve(status_page=False) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/status.json")).status_code == 404


async def test_the_data_needs_the_key_and_the_page_does_not(serve):
    async with serve(api_key="secret") as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/status.json")).status_code == 401


async def test_vllms_names_on_request(serve):
    async with serve(metrics_alias="vllm") as server, httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        text = (await client.get("/metrics")).text

    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert len(families["vllm:" + name].samples) == 1
    first = {s.name: s.value for s in families["vllm:time_to_first_token_seconds"].samples}
    assert first["vllm:time_to_first_token_seconds_count"] == 1
    assert families["vllm:num_requests_running"].samples[0].labels["model_name"]


async def test_without_the_alias_there_are_none_of_them(client):
    assert "vllm:" not in (await client.get("/metrics")).text
