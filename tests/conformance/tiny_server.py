"""`lacunar serve` of a tiny random model as a process of its own, for the scripts of this folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.http.tiny_tokenizer import write_tokenizer

CONTEXT_TOKENS = 2048

# Float32 keys and values of 2 layers with 2 heads of 16 each.
KV_BYTES_OF_A_TOKEN = 2 * 2 * 2 * 16 * 4

_STOP_SECONDS = 60


def save_model(path: Path) -> None:
    """A Llama of two layers with random weights, and a byte-level tokenizer with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)


@dataclass
class TinyServer:
    """A running server and what it has written to its log."""

    popen: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """The API process and its engine."""
        api = psutil.Process(self.popen.pid)
        (engine,) = [child for child in api.children() if "service.engine" in child.cmdline()]
        return {"api": api, "engine": engine}

    @property
    def alive(self) -> bool:
        """Whether the API process runs; it ends when its engine does."""
        return self.popen.poll() is None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(_STOP_SECONDS)

    def complaints(self) -> list[str]:
        """Lines of the log that speak of a fault of the server's own."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if re.search(r"Traceback|\bERROR\b|\bfailed\b|never awaited", line)]


@contextmanager
def tiny_server(**options: object) -> Iterator[TinyServer]:
    """Serve the tiny model on a free port of the loopback device, with these settings; killed at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LACUNAR_")}
    settings = {"port": 0, "threads": 1, "log_level": "warning", **options}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as directory:
        model, log = Path(directory) / "tiny", Path(directory) / "log"
        save_model(model)
        with log.open("w") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "service", "serve", str(model), *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            match = re.search(r"http://[^/\s]+", line)
            if match is None:
                raise RuntimeError(f"no address in {line!r}; the log: {log.read_text()}")
            yield TinyServer(popen, match[0], log)
        finally:
            popen.kill()
            popen.wait()
