"""Runs every expression of the alerts and of the dashboard against a live Prometheus under load.

    python tests/deploy/live_expressions.py MODEL [--seconds 45]

Starts a server on the CPU, with a stand-in for NVML's library (the values of an H200 that move), and Debian's
Prometheus scraping it with the project's rules; asks the server all the while; then each expression must
parse and return data. An alert's expression is also run without its comparison: the alert itself is quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# What may rightly be empty under this load, and why.
MAY_BE_EMPTY: dict[str, str] = {}

SERVER = """
import functools, itertools, sys
import service.api.server as server
from tests.unit.test_gpu_monitor import FakeNvml

class Moving(FakeNvml):
    def __getattr__(self, name):
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            self.values[name] += 35_000
        return super().__getattr__(name)

start = server.start_gpu_monitor
server.start_gpu_monitor = lambda metrics, seconds, **_: start(metrics, seconds, Moving(), device="cuda")
from service.cli import main
main()
"""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expressions() -> list[tuple[str, str]]:
    """(where, expression) of all rules and panels, with the dashboard's variables filled in."""
    found = []
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            found.append((name, rule["expr"]))
    dashboard = json.loads((ROOT / "deploy/grafana/lacunar.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "20s").replace("$instance", ".+")
            found.append((f"{panel['title']} / {target['legendFormat']}", text))
    return found


def without_comparison(expression: str) -> str:
    """The measured side of an alert: all before the threshold."""
    first = expression.partition(" and on ")[0]
    return re.sub(r"\s*(==|>|<)\s*[\d.]+\s*$", "", first.strip())


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(url: str, seconds: float) -> None:
    """Until `url` answers 200."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} did not answer within {seconds} s")


async def ask(url: str, seconds: float) -> None:
    """Short streams, one of them cut off, and a request that is refused."""
    end = time.monotonic() + seconds
    prefix = "The quick brown fox jumps over the lazy dog. " * 8

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one(number: int) -> None:
            count = 0
            while time.monotonic() < end:
                count += 1
                body = {"prompt": f"{prefix}{number} {count}", "max_tokens": 12, "stream": True}
                chat = {"messages": [{"role": "user", "content": f"Hello {count}"}], "max_tokens": 6}
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        if count % 5 == 0:
                            break
                await http.post("/v1/chat/completions", json=chat)
                await http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})

        await asyncio.gather(*(one(number) for number in range(3)))


def main() -> None:
    """Start both, ask, check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=45)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", "prometheus"], check=True)
    port, prometheus_port = free_port(), free_port()
    url, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prometheus_port}"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(ROOT / "deploy/prometheus/rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        (work / "prometheus.yml").write_text(yaml.safe_dump(config))
        server = [sys.executable, "-c", SERVER, "serve", str(options.model), "--port", str(port)]
        scraper = [
            "prometheus",
            f"--config.file={work}/prometheus.yml",
            f"--storage.tsdb.path={work}/data",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        ]
        with running([*server, "--no-access-log"], work / "server.log"):
            wait_for(url + "/readyz", 180)
            with running(scraper, work / "prometheus.log"):
                wait_for(prometheus + "/-/ready", 60)
                asyncio.run(ask(url, options.seconds))
                failed = check(prometheus)
    raise SystemExit(failed)


def check(prometheus: str) -> int:
    """Prints each expression that fails; the number of those."""
    failed = 0
    found = expressions()
    alerts = {name for name, _ in found if name.startswith("Lacunar") and " / " not in name}
    for name, text in found:
        queries = [text] if name not in alerts else [without_comparison(text)]
        if name in alerts:
            answer = httpx.get(prometheus + "/api/v1/query", params={"query": text}).json()
            if answer["status"] != "success":
                failed += 1
                print(f"FAILS   {name}: {answer.get('error')}")
        for query in queries:
            answer = httpx.get(prometheus + "/api/v1/query", params={"query": query}).json()
            if answer["status"] != "success":
                failed += 1
                print(f"FAILS   {name}: {query}: {answer.get('error')}")
            elif not answer["data"]["result"] and name not in MAY_BE_EMPTY:
                failed += 1
                print(f"EMPTY   {name}: {query}")
    rules = httpx.get(prometheus + "/api/v1/rules").json()["data"]["groups"]
    for rule in (rule for group in rules for rule in group["rules"]):
        if rule["health"] != "ok":
            failed += 1
            print(f"RULE    {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
    print(f"{len(found)} expressions against a live Prometheus, {failed} failed")
    return min(failed, 100)


if __name__ == "__main__":
    main()
