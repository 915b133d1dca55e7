"""guidellm with synthetic text and the served model's tokenizer, offline, for http_suites.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.http_plugins.lacunar_server import Server

NAME = "served"
REQUESTS = 16
STREAMS = 2
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def run(
    variables: dict[str, str], python: Path, directory: Path
) -> tuple[list[tuple[str, bool, str]], list[str]]:
    """Serve the model and run one short benchmark against each endpoint.

    Returns:
        (name, whether it holds, what was measured) for each benchmark; and lines for the page.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.update({key: variables[key] for key in ("LACUNAR_PYTHON", "LACUNAR_SOURCE", "LACUNAR_MODEL")})
    flags = ["--served-model-name", NAME, "--max-model-len", "1024", "--kv-cache-bytes", str(2**29)]
    checks, notes = [], []
    with Server(
        [*flags, "--threads", variables["SUITE_THREADS"]], log=Path(variables["SUITE_LOG"])
    ) as server:
        for endpoint in ENDPOINTS:
            result = _benchmark(variables, python, directory, server.url, endpoint)
            totals = {kind: len(requests) for kind, requests in result["requests"].items() if requests}
            outputs = [
                request["output_metrics"]["text_tokens"] for request in result["requests"]["successful"]
            ]
            # ignore_eos, max_tokens and min_tokens must have been honoured, and the streamed usage be right.
            exact = outputs == [OUTPUT_TOKENS] * REQUESTS
            said = ", ".join(f"{count} {kind}" for kind, count in totals.items())
            checks.append((endpoint, exact, f"{said}; output tokens {sorted(set(outputs))}"))
            notes.append(f"- `{endpoint}`, {STREAMS} streams: {said}; output tokens {sorted(set(outputs))}.")
    return checks, notes


def _benchmark(
    variables: dict[str, str], python: Path, directory: Path, url: str, endpoint: str
) -> dict[str, Any]:
    written = directory / (endpoint.rpartition("/v1/")[2].replace("/", "-") + ".json")
    command = [str(python), "-m", "guidellm", "run", "--disable-console"]
    for option, values in {
        "backend": {"kind": "openai_http", "target": url, "model": NAME, "request_format": endpoint},
        "profile": {"kind": "concurrent", "streams": STREAMS},
        "constraint": {"kind": "max_requests", "count": REQUESTS},
        "tokenizer": {"kind": "huggingface_auto", "model": variables["LACUNAR_MODEL"]},
        "data": {
            "kind": "synthetic_text",
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        "output": {"kind": "json", "path": written},
    }.items():
        command += [f"--{option}", ",".join(f"{key}={value}" for key, value in values.items())]
    output = Path(variables["SUITE_LOG"]).with_name("guidellm.log")
    with output.open("wb") as lines:
        environment = {**variables, "PYTHONPATH": ""}
        status = subprocess.run(command, stdout=lines, stderr=lines, env=environment).returncode
    if status != 0:
        print(output.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise SystemExit(f"guidellm ended with status {status}")
    benchmark: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))["benchmarks"][0]
    return benchmark
