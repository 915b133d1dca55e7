"""`lacunar serve` as a process of its own: a tiny real model, the real engine, signals and exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from .conftest import sse
from .tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

START_SECONDS = 120
CONTEXT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Llama of two layers with random weights, and the tiny tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path


@dataclass
class Process:
    """A running `lacunar serve`."""

    popen: subprocess.Popen[str]
    url: str

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics, summed over their labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(START_SECONDS)


def start(model: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LACUNAR_")}
    return subprocess.Popen(
        [sys.executable, "-m", "service", "serve", str(model), "--port", "0", "--threads", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def launch(model: Path, *arguments: str) -> Iterator[Process]:
    popen = start(model, *arguments)
    try:
        assert popen.stdout is not None
        line = popen.stdout.readline()
        match = re.search(r"http://[^/]+", line)
        if match is None:
            popen.kill()
            pytest.fail(f"no address in {line!r}; {popen.communicate()[1]}")
        yield Process(popen, match[0])
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.communicate()


@pytest.fixture(scope="module")
def server(model) -> Iterator[Process]:
    """One server for the tests that leave it as it was."""
    yield from launch(model)


@pytest.fixture
def own_server(model) -> Iterator[Process]:
    """A server that a test may stop or break."""
    yield from launch(model, "--drain-seconds", "60")


def request(**fields) -> dict:
    return {"prompt": "the quick brown", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}


def test_a_plain_and_a_streamed_completion_agree_and_are_counted(server):
    before = server.metrics().get("lacunar_requests_total", 0)
    plain = httpx.post(f"{server.url}/v1/completions", json=request(), timeout=60).json()
    streamed = httpx.post(f"{server.url}/v1/completions", json=request(stream=True), timeout=60)

    *events, done = sse(streamed.text)
    assert done == "[DONE]"
    assert len(events) > 1
    assert "".join(event["choices"][0]["text"] for event in events) == plain["choices"][0]["text"]
    assert plain["usage"]["completion_tokens"] == 24
    assert plain["choices"][0]["finish_reason"] == "length"
    assert server.metrics()["lacunar_requests_total"] == before + 2


def test_greedy_text_is_transformers_text(server, model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer("the quick brown", return_tensors="pt").input_ids
    with torch.no_grad():
        out = reference.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, top_k=None)
    want = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    got = httpx.post(f"{server.url}/v1/completions", json=request(), timeout=60).json()

    assert got["choices"][0]["text"] == want


def test_the_openai_client_chats_with_the_real_engine(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=8,
            n=2,
            seed=3,
            logprobs=True,
            top_logprobs=3,
        )
    assert name == "tiny-llama"
    assert len(answer.choices) == 2
    for choice in answer.choices:
        logprobs = choice.logprobs.content
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in logprobs)


def test_a_seed_gives_the_same_text_alone_and_in_company(server):
    seeded = request(temperature=1.0, seed=11, max_tokens=32)

    async def ask(count: int) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            company = [client.post("/v1/completions", json=request(temperature=1.0)) for _ in range(count)]
            answers = await asyncio.gather(client.post("/v1/completions", json=seeded), *company)
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(ask(0))[0] == asyncio.run(ask(5))[0]


def test_prompt_logprobs_come_with_echo(server):
    body = httpx.post(
        f"{server.url}/v1/completions", json=request(echo=True, max_tokens=0, logprobs=1), timeout=60
    ).json()

    choice = body["choices"][0]
    assert choice["text"] == "the quick brown"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_a_client_that_leaves_frees_its_sequence_in_the_engine(server):
    before = server.metrics()

    async def leave() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(request(stream=True, max_tokens=4000)).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        await reader.readuntil(b"data: ")
        writer.close()

    asyncio.run(leave())
    finished = "lacunar_sequences_finished_total"
    while (now := server.metrics())[finished] == before[finished] or now["lacunar_sequences_running"]:
        pass
    generated = now["lacunar_generation_tokens_total"] - before["lacunar_generation_tokens_total"]
    assert 1 <= generated < 4000


def test_the_weights_and_linear_calls_are_on_the_page(server):
    httpx.post(f"{server.url}/v1/completions", json=request(), timeout=60)
    metrics = server.metrics()

    assert metrics["lacunar_weight_dense_bytes"] >= metrics["lacunar_weight_stored_bytes"] > 0
    assert metrics["lacunar_linear_calls_total"] > 0
    assert metrics["lacunar_step_seconds_count"] > 0
    assert metrics["lacunar_kv_blocks"] > 0


def test_sigterm_finishes_an_open_stream_and_exits_0(own_server):
    with httpx.stream(
        "POST", f"{own_server.url}/v1/completions", json=request(stream=True, max_tokens=1000), timeout=60
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        own_server.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]

    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert own_server.popen.wait(START_SECONDS) == 0


def test_the_engines_death_ends_an_open_stream_with_an_error_and_the_server_with_1(own_server):
    (engine,) = psutil.Process(own_server.popen.pid).children()
    with httpx.stream(
        "POST", f"{own_server.url}/v1/completions", json=request(stream=True, max_tokens=4000), timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        engine.kill()
        rest = [line for line in lines if line]

    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert own_server.popen.wait(START_SECONDS) == 1


def test_nothing_stays_behind_after_sigterm(own_server):
    children = psutil.Process(own_server.popen.pid).children(recursive=True)

    assert own_server.stop() == 0
    assert not any(child.is_running() for child in children)


def test_a_model_is_pruned_inspected_and_served(model, tmp_path):
    pruned = tmp_path / "pruned"
    command = [sys.executable, "-m", "service"]
    prune = [*command, "prune", str(model), str(pruned), "--method", "magnitude", "--sparsity", "0.5"]
    done = subprocess.run(prune, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "sparsity 0.500" in done.stdout

    inspect = [*command, "inspect", str(pruned)]
    table = subprocess.run(inspect, capture_output=True, text=True, timeout=START_SECONDS, check=True).stdout
    report = json.loads(
        subprocess.run(
            [*inspect, "--json"], capture_output=True, text=True, timeout=START_SECONDS, check=True
        ).stdout
    )
    bitmaps = [layer for layer in report["layers"] if layer["format"] == "bitmap"]
    assert len(bitmaps) == 8
    assert all(layer["name"] in table for layer in report["layers"])
    assert all(layer["sparsity"] == pytest.approx(0.5, abs=0.01) for layer in bitmaps)
    assert sum(layer["stored_bytes"] for layer in bitmaps) < 0.6 * sum(
        layer["dense_bytes"] for layer in bitmaps
    )

    for server in launch(pruned):
        answer = httpx.post(f"{server.url}/v1/completions", json=request(), timeout=60).json()
        page = httpx.get(f"{server.url}/metrics").text
        assert server.stop() == 0
    assert answer["usage"]["completion_tokens"] == 24
    assert (
        f'lacunar_weight_stored_bytes{{format="bitmap"}} {float(sum(b["stored_bytes"] for b in bitmaps))}'
        in page
    )


def test_pruning_onto_something_that_exists_is_refused(model, tmp_path):
    command = [sys.executable, "-m", "service", "prune", str(model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)

    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_while_loading_exits_0(model):
    popen = start(model)
    assert popen.stderr is not None
    popen.stderr.readline()  # the first line of progress: the engine process exists
    popen.send_signal(signal.SIGTERM)
    out, _ = popen.communicate(timeout=START_SECONDS)

    assert popen.returncode == 0
    assert "is served on" not in out


def test_a_truncated_checkpoint_is_one_message_and_exit_1(model, tmp_path):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    popen = start(tmp_path)
    _, err = popen.communicate(timeout=START_SECONDS)

    assert popen.returncode == 1
    assert "lacunar: " in err
    assert "model.safetensors" in err
    assert "Traceback" not in err
