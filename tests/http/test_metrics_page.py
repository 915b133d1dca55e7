"""/metrics as Prometheus reads it."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.engine.protocol import EngineStats


async def scrape(client, **headers):
    response = await client.get("/metrics", headers=headers)
    assert response.status_code == 200
    return response, {family.name: family for family in text_string_to_metric_families(response.text)}


def total(families, name, **labels) -> float:
    family = families[name.removesuffix("_total")] if name.endswith("_total") else families[name]
    return sum(
        sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_one_plain_and_one_streamed_completion_are_two_requests(client, server):
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 64})
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 64, "stream": True, "n": 3})
    _, families = await scrape(client)

    assert total(families, "lacunar_requests_total") == 2
    assert total(families, "lacunar_requests_total", endpoint="completions") == 2
    assert total(families, "lacunar_sequences_finished_total", reason="stop") == 4
    assert total(families, "lacunar_http_requests_total", route="/v1/completions", status="200") == 2
    tokens = sum(sequence.produced for sequence in server.engine.added)
    counts = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.labels
    }
    assert counts["lacunar_time_to_first_token_seconds_count"] == 4
    assert counts["lacunar_inter_token_seconds_count"] == tokens - 4
    assert counts["lacunar_queue_seconds_count"] == 4
    assert counts["lacunar_queue_seconds_sum"] == pytest.approx(0.004)
    assert counts["lacunar_prefill_seconds_sum"] == pytest.approx(0.008)
    assert total(families, "lacunar_request_duration_seconds") == 0  # the family's samples carry suffixes
    assert (
        sum(
            sample.value
            for sample in families["lacunar_request_duration_seconds"].samples
            if sample.name.endswith("_count")
        )
        == 2
    )


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0", "text/plain"])
async def test_the_page_is_always_text_0_0_4(client, accept):
    response, _ = await scrape(client, Accept=accept)

    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# EOF" not in response.text
    assert "_created" not in response.text


async def test_paths_that_do_not_exist_share_one_series(client):
    for path in ("/a", "/b", "/v1/c"):
        await client.get(path)
    await client.request("PROPFIND", "/coffee")
    _, families = await scrape(client)

    unmatched = {
        (sample.labels["method"], sample.labels["status"]): sample.value
        for sample in families["lacunar_http_requests"].samples
        if sample.labels["route"] == "unmatched"
    }
    assert unmatched == {("GET", "404"): 3, ("other", "404"): 1}


async def test_the_engines_state_and_the_weights_are_published(client, server):
    server.engine.on_stats(
        EngineStats(
            running=2,
            waiting=3,
            kv_blocks_used=4,
            kv_blocks_total=10,
            generation_tokens_total=50,
            step_seconds=[("decode", 0.004, 2), ("prefill", 0.1, 128)],
            linear_calls_total={"bitmap_generic|1": 7, "dense|65+": 2},
            resident_bytes=1234,
        )
    )
    server.engine.on_stats(
        EngineStats(generation_tokens_total=60, linear_calls_total={"bitmap_generic|1": 9})
    )
    _, families = await scrape(client)

    assert total(families, "lacunar_generation_tokens_total") == 60
    assert total(families, "lacunar_linear_calls_total", backend="bitmap_generic", m_bucket="1") == 9
    assert total(families, "lacunar_linear_calls_total", backend="dense", m_bucket="65+") == 2
    assert total(families, "lacunar_weight_dense_bytes", format="bitmap") == 256
    assert total(families, "lacunar_weight_stored_bytes", format="bitmap") == 144
    assert total(families, "lacunar_weight_sparsity_ratio", format="bitmap") == 0.5
    assert total(families, "lacunar_engine_resident_memory_bytes") == 1234
    assert "process_resident_memory_bytes" in families
    assert not any(name.startswith("lacunar_gpu") for name in families)


async def test_the_model_has_the_name_that_clients_use(serve):
    """Whoever joins the page to a gateway's metrics has only that one."""
    async with serve(served_model_name="ours") as server, httpx.AsyncClient(base_url=server.url) as http:
        _, families = await scrape(http)
        models = (await http.get("/v1/models")).json()["data"]

    assert total(families, "lacunar_model_info", model_name="ours") == 1
    assert [model["id"] for model in models] == ["ours"]


async def test_reasons_and_phases_exist_before_their_first_event(client):
    _, families = await scrape(client)

    reasons = {sample.labels["reason"] for sample in families["lacunar_sequences_finished"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    phases = {sample.labels["phase"] for sample in families["lacunar_step_seconds"].samples}
    assert phases == {"prefill", "decode", "mixed"}


async def test_latency_buckets_reach_from_half_a_millisecond_to_ten_minutes(client):
    response, _ = await scrape(client)

    bounds = re.findall(r'lacunar_time_to_first_token_seconds_bucket\{le="([^"]+)"\}', response.text)
    assert float(bounds[0]) == 0.0005
    assert float(bounds[-2]) == 600
    assert bounds[-1] == "+Inf"


async def test_the_build_says_whether_it_has_cuda_kernels(client, server):
    """What was left out of a build must be visible where it runs."""
    _, families = await scrape(client)
    (sample,) = families["lacunar_build_info"].samples

    assert sample.labels["cuda_kernels"] == "no"
    assert sample.labels["cpu_isa"] == "generic"
