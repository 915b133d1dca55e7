"""Starts `lacunar serve` for suites that run in environments of their own; only the standard library.

LACUNAR_PYTHON is the interpreter that has Lacunar, LACUNAR_SOURCE the checkout, LACUNAR_MODEL the model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from socket import socket

READY_SECONDS = 180.0
STOP_SECONDS = 60.0


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `lacunar serve`; a context.

    Args:
        flags: further command line flags.
        log: where the server's output goes.
    """

    def __init__(
        self, flags: Sequence[str] = (), *, log: Path | None = None, port: int | None = None
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = tuple(flags)
        self._log = (log or Path(os.devnull)).open("ab")
        # The suites' own environment (PYTHONPATH, plug-ins) is not the server's.
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTHON", "PYTEST", "LACUNAR_"))
        }
        command = [os.environ["LACUNAR_PYTHON"], "-m", "service", "serve", os.environ["LACUNAR_MODEL"]]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            cwd=os.environ["LACUNAR_SOURCE"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> None:
        """Returns when requests are taken. Raises RuntimeError when the server ends or takes too long."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"lacunar serve {' '.join(self.flags)} ended with status {status}")
            try:
                with urllib.request.urlopen(self.url + "/readyz", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"lacunar serve was not ready within {READY_SECONDS:.0f} s")

    def stop(self) -> int:
        """End the server; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                print("lacunar serve did not stop at SIGTERM", file=sys.stderr)
        self._log.close()
        return self.process.returncode

    def __enter__(self) -> Server:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
