"""Random traffic against `lacunar serve`, from friendly clients and from hostile ones; a script.

    python -m tests.conformance.soak_http --seconds 3600 --output soak.json

A tiny model is served on the loopback device, with a KV cache and a queue too small for all that comes.
Clients ask plainly and in streams, leave in the middle, send nonsense, read a few bytes a second, open
connections and say nothing, or close one half of them. Wherever a client waits for its answer the answer
must be right: greedy texts equal those of the idle server, streams end with [DONE], token counts fit. Ten
times (twice in a run of under ten minutes) the traffic pauses, and the server must be as it was: no
sequence, no KV block and no connection in use. At the end neither of its processes may have grown by a
tenth, its log must be free of faults, and SIGTERM must end it with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from .tiny_server import CONTEXT_TOKENS, KV_BYTES_OF_A_TOKEN, TinyServer, tiny_server

MAX_OPEN = 96
BODY_SECONDS = 4
KEEP_ALIVE_SECONDS = 5
QUIET_SECONDS = 60
ANSWER_SECONDS = 120
PROMPTS = (
    "the quick brown",
    "a",
    "one two three four",
    "fox 🦊 and more",
    "x" * 300,
    "the quick brown fox jumps",
)
LENGTHS = (1, 7, 40)
IN_USE = ("sequences_running", "sequences_waiting", "kv_blocks_used")
BAD_BODIES = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": [-1]}',
    b'{"prompt": ""}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": 100000}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "n": 100000}',
    b'{"prompt": "a", "logit_bias": {"99999": 1}}',
    b'{"prompt": "a", "guided_regex": "("}',
    b'{"messages": ' + b"[" * 20000 + b"}",
)


def request(prompt: str, length: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, **fields}


class Soak:
    """The clients and what they have seen."""

    def __init__(self, url: str, processes: dict[str, psutil.Process], rate: float) -> None:
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.processes = processes
        self.rate = rate
        self.seen: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.wanted: dict[tuple[str, int], str] = {}
        self.health_seconds: list[float] = []
        self.memory: list[dict[str, float]] = []
        self.open: set[asyncio.Task[None]] = set()
        self.client = httpx.AsyncClient(
            base_url=url, timeout=ANSWER_SECONDS + 30, limits=httpx.Limits(max_connections=None)
        )

    # What one client does

    async def plain(self, rng: random.Random) -> None:
        """Asks, waits, and compares."""
        prompt, length = rng.choice(PROMPTS), rng.choice(LENGTHS)
        n = rng.choice((1, 1, 1, 2, 4))
        answer = await self.client.post("/v1/completions", json=request(prompt, length, n=n))
        if not self._accepted(answer.status_code, answer.text):
            return
        body = answer.json()
        assert [choice["text"] for choice in body["choices"]] == [self.wanted[prompt, length]] * n, body
        assert body["usage"]["completion_tokens"] == length * n, body["usage"]

    async def chat(self, rng: random.Random) -> None:
        """Samples with a seed, twice the same."""
        fields = {
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "max_tokens": rng.choice(LENGTHS),
            "seed": rng.randrange(2**40),
            "temperature": 1.0,
            "logprobs": True,
            "top_logprobs": rng.randrange(4),
            "stop": rng.choice((None, "e", ["qu", "zz"])),
        }
        texts = []
        for _ in range(2):
            answer = await self.client.post("/v1/chat/completions", json=fields)
            if not self._accepted(answer.status_code, answer.text):
                return
            texts.append(answer.json()["choices"][0]["message"]["content"])
        assert texts[0] == texts[1], texts

    async def stream(self, rng: random.Random, pause_seconds: float = 0.0) -> None:
        """Reads to the end, perhaps slowly."""
        prompt, length = rng.choice(PROMPTS), rng.choice(LENGTHS)
        fields = request(prompt, length, stream=True, stream_options={"include_usage": True})
        async with self.client.stream("POST", "/v1/completions", json=fields) as answer:
            if not self._accepted(answer.status_code, ""):
                await answer.aread()
                return
            text, last, usage = "", "", None
            async for line in answer.aiter_lines():
                if not line:
                    continue
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    event = json.loads(last)
                    assert "error" not in event, event
                    usage = event["usage"] or usage
                    text += "".join(choice["text"] for choice in event["choices"])
                if pause_seconds:
                    await asyncio.sleep(pause_seconds)
        assert last == "[DONE]", last
        assert text == self.wanted[prompt, length], text
        assert usage is not None
        assert usage["completion_tokens"] == length, usage

    async def slow(self, rng: random.Random) -> None:
        """A reader with a tiny socket buffer, a few bytes at a time."""
        prompt, length = rng.choice(PROMPTS), LENGTHS[-1]
        reader, writer = await self._connect(small_buffer=True)
        try:
            writer.write(self._post(request(prompt, length, stream=True)))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                part = await asyncio.wait_for(reader.read(rng.choice((16, 64, 512))), ANSWER_SECONDS)
                if not part:
                    break
                data += part
                await asyncio.sleep(rng.random() * 0.05)
                if not data.startswith(b"HTTP/1.1 200"[: len(data)]):
                    break
            if self._accepted(int(data.split(b" ", 2)[1]), data.decode(errors="replace")):
                assert b"data: [DONE]" in data, data[-200:]
        finally:
            writer.close()

    async def leaves(self, rng: random.Random) -> None:
        """Goes away in a stream, orderly or not."""
        reader, writer = await self._connect()
        writer.write(self._post(request(rng.choice(PROMPTS), 1500, stream=True)))
        for _ in range(rng.randrange(1, 30)):
            if not await asyncio.wait_for(reader.readline(), ANSWER_SECONDS):
                break
        self._end(rng, writer)

    async def leaves_before_the_answer(self, rng: random.Random) -> None:
        """Goes away while a plain answer is computed, or in its own request."""
        _, writer = await self._connect()
        data = self._post(request(rng.choice(PROMPTS), 1500))
        writer.write(data[: rng.randrange(1, len(data) + 1)] if rng.random() < 0.5 else data)
        await asyncio.sleep(rng.random() * 0.3)
        self._end(rng, writer)

    async def half_open(self, rng: random.Random) -> None:
        """Sends a part of a request and waits for the server to lose patience."""
        reader, writer = await self._connect()
        data = self._post(request("a", 7))
        body_begins = data.index(b"\r\n\r\n") + 4
        sent = rng.choice((0, 10, body_begins - 2, body_begins + 5))
        writer.write(data[:sent])
        limit = 3 * (BODY_SECONDS + KEEP_ALIVE_SECONDS)
        try:
            answer = await asyncio.wait_for(reader.read(), limit)
        except TimeoutError:
            raise AssertionError(f"{sent} bytes of a request were waited for longer than {limit} s") from None
        finally:
            writer.close()
        if sent > body_begins:
            assert answer.startswith(b"HTTP/1.1 408"), answer[:200]

    async def half_closed(self, rng: random.Random) -> None:
        """Sends all and closes its half: an answer or the end, but no hang."""
        reader, writer = await self._connect()
        writer.write(self._post(request(rng.choice(PROMPTS), 7, stream=rng.random() < 0.5)))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), ANSWER_SECONDS)
        writer.close()

    async def silent(self, rng: random.Random) -> None:
        """Asks for a long stream and never reads; then is killed."""
        _, writer = await self._connect(small_buffer=True)
        writer.write(self._post(request(rng.choice(PROMPTS), 1500, stream=True, n=2)))
        await asyncio.sleep(rng.random() * 10)
        writer.transport.abort()

    async def bad(self, rng: random.Random) -> None:
        """Sends what must be refused."""
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
        body = rng.choice((*BAD_BODIES, b" " * 70_000, rng.randbytes(40)))
        answer = await self.client.post(path, content=body, headers={"Content-Type": "application/json"})
        if path == "/tokenize" and answer.status_code == 200:
            return
        assert answer.status_code in (400, 404, 413), (path, body[:80], answer.status_code, answer.text[:200])
        assert answer.json()["error"]["message"]

    async def nonsense(self, rng: random.Random) -> None:
        """Not HTTP at all."""
        reader, writer = await self._connect()
        writer.write(
            rng.choice((b"\x16\x03\x01" + rng.randbytes(60), b"GET /\r\n\r\n\r\n", rng.randbytes(200)))
        )
        writer.write_eof()
        await asyncio.wait_for(reader.read(), ANSWER_SECONDS)
        writer.close()

    async def burst(self, rng: random.Random) -> None:
        """More than the queue holds, at once: some are refused, and say when to come back."""
        answers = await asyncio.gather(
            *(self.client.post("/v1/completions", json=request("a", 40, n=8)) for _ in range(8))
        )
        for answer in answers:
            if self._accepted(answer.status_code, answer.text):
                assert len(answer.json()["choices"]) == 8
            else:
                assert answer.headers["retry-after"]

    # Helpers

    def _accepted(self, status: int, text: str) -> bool:
        self.statuses[str(status)] += 1
        assert status in (200, 429), (status, text[:300])
        return status == 200

    async def _connect(
        self, *, small_buffer: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        link = socket.socket()
        if small_buffer:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, (self.host, self.port))
        return await asyncio.open_connection(sock=link, limit=1024 if small_buffer else 2**16)

    @staticmethod
    def _post(fields: dict[str, Any]) -> bytes:
        body = json.dumps(fields).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    @staticmethod
    def _end(rng: random.Random, writer: asyncio.StreamWriter) -> None:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    # The whole

    async def prepare(self) -> None:
        """What the idle server says to each prompt."""
        for prompt in PROMPTS:
            for length in LENGTHS:
                answer = await self.client.post("/v1/completions", json=request(prompt, length))
                self.wanted[prompt, length] = answer.json()["choices"][0]["text"]

    async def traffic(self, rng: random.Random, end: float) -> None:
        """Clients arrive at random until the time is up."""
        kinds = {
            self.plain: 30, self.chat: 15, self.stream: 25, self.slow: 4, self.leaves: 8,
            self.leaves_before_the_answer: 6, self.half_open: 3, self.half_closed: 2, self.silent: 1,
            self.bad: 12, self.nonsense: 2, self.burst: 1,
        }  # fmt: skip
        while time.monotonic() < end:
            await asyncio.sleep(rng.expovariate(self.rate))
            if len(self.open) >= MAX_OPEN:
                self.seen["held back"] += 1
                continue
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            task = asyncio.create_task(self._one(kind, random.Random(rng.random())))
            self.open.add(task)
            task.add_done_callback(self.open.discard)

    async def _one(self, kind: Any, rng: random.Random) -> None:
        name = kind.__name__
        self.seen[name] += 1
        hostile = name not in ("plain", "chat", "stream", "bad", "burst")
        try:
            await kind(rng)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            # A server may end a connection with a reset on those who did worse to it.
            if not hostile:
                self.faults.append(f"{name}: {error!r}")
        except Exception as error:
            self.faults.append(f"{name}: {type(error).__name__}: {error}"[:500])
            print(self.faults[-1], flush=True)

    async def watch(self) -> None:
        """Health each second, as an orchestrator asks."""
        async with httpx.AsyncClient(base_url=self.url, timeout=10) as client:
            while True:
                began = time.monotonic()
                answer = await client.get("/livez")
                self.health_seconds.append(time.monotonic() - began)
                if answer.status_code != 200:
                    self.faults.append(f"/livez says {answer.status_code}: {answer.text}")
                await asyncio.sleep(1)

    async def metrics(self) -> dict[str, float]:
        """/metrics, summed over labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.client.get("/metrics")).text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def settle(self) -> None:
        """The traffic has paused: everybody gets an answer, and then nothing is in use."""
        if self.open:
            _, stuck = await asyncio.wait(set(self.open), timeout=ANSWER_SECONDS + QUIET_SECONDS)
            self.faults += [f"stuck: {task}" for task in stuck]
        limit = time.monotonic() + QUIET_SECONDS
        while True:
            now = await self.metrics()
            used = {
                name: now[name]
                for name in (
                    "lacunar_sequences_running",
                    "lacunar_sequences_waiting",
                    "lacunar_kv_blocks_used",
                )
            }
            used["requests open"] = (await self.client.get("/load")).json()["server_load"]
            if not any(used.values()):
                break
            if time.monotonic() > limit:
                self.faults.append(f"not idle {QUIET_SECONDS} s after the last request: {used}")
                break
            await asyncio.sleep(0.5)
        # Connections that clients left open end with the keep-alive.
        await asyncio.sleep(KEEP_ALIVE_SECONDS + 2)
        facts = {name: process.memory_info().rss / 2**20 for name, process in self.processes.items()}
        facts["api_descriptors"] = self.processes["api"].num_fds()
        facts["api_connections"] = len(self.processes["api"].net_connections("tcp"))
        facts["requests"] = float(sum(self.seen.values()))
        self.memory.append(facts)
        print({name: round(value, 1) for name, value in facts.items()}, flush=True)


async def soak(options: argparse.Namespace, server: TinyServer) -> dict[str, Any]:
    """All of it; returns the report."""
    soak = Soak(server.url, server.processes, options.rate)
    rng = random.Random(options.seed)
    await soak.prepare()
    watching = asyncio.create_task(soak.watch())
    began = time.monotonic()
    parts = 10 if options.seconds >= 600 else 2
    for part in range(1, parts + 1):
        await soak.traffic(rng, began + options.seconds * part / parts)
        await soak.settle()
        if not server.alive or watching.done():
            soak.faults.append("the server has gone")
            break
    seconds = time.monotonic() - began
    watching.cancel()
    metrics = await soak.metrics()
    cpu = {name: sum(process.cpu_times()[:2]) / seconds for name, process in soak.processes.items()}
    await soak.client.aclose()
    for name in ("api", "engine"):
        # From the second pause on: the first has the caches that fill.
        early, late = soak.memory[1 if len(soak.memory) > 2 else 0][name], soak.memory[-1][name]
        if late > 1.1 * early:
            soak.faults.append(f"the {name} process grew from {early:.1f} to {late:.1f} MiB")
    if soak.memory[-1]["api_descriptors"] > soak.memory[0]["api_descriptors"] + 2:
        soak.faults.append("file descriptors were left behind")
    health = sorted(soak.health_seconds)
    return {
        "seconds": round(seconds, 1),
        "rate_per_second": options.rate,
        "clients": dict(soak.seen),
        "statuses_of_generations": dict(soak.statuses),
        "livez_seconds": {
            "asked": len(health),
            "p50": health[len(health) // 2],
            "p99": health[int(len(health) * 0.99)],
            "largest": health[-1],
        },
        "memory_mib": soak.memory,
        "cpu_share": {name: round(value, 3) for name, value in cpu.items()},
        "server": {
            name: metrics[name]
            for name in (
                "lacunar_requests_total", "lacunar_generation_tokens_total", "lacunar_preemptions_total",
                "lacunar_rejections_total", "lacunar_prefix_cache_hits_total",
            )
            if name in metrics
        },
        "faults": soak.faults,
    }  # fmt: skip


def main() -> int:
    """Make a model, serve it, let the clients loose, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=6.0, help="clients that arrive each second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the report here")
    options = parser.parse_args()
    with tiny_server(
        max_num_sequences=16,
        max_queue=24,
        # A sixteenth of what 16 sequences may want.
        kv_cache_bytes=CONTEXT_TOKENS * KV_BYTES_OF_A_TOKEN,
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
        body_seconds=BODY_SECONDS,
        request_seconds=ANSWER_SECONDS,
        max_body_bytes=64 * 1024,
    ) as server:
        report = asyncio.run(soak(options, server))
        status = server.stop()
        if status != 0:
            report["faults"].append(f"SIGTERM ended the server with {status}")
        report["faults"] += server.complaints()
    text = json.dumps(report, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
