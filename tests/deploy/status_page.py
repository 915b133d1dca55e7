"""The status page in a real browser: Debian's chromium, driven over WebDriver.

    python tests/deploy/status_page.py MODEL [--screenshot docs/status-page.png]

Starts a server, opens the page, waits for the model's name and its layers, asks a prompt and watches its
answer grow, stops a second one, and takes a picture.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.deploy.live_expressions import free_port, running, wait_for  # noqa: E402


class Browser:
    """One WebDriver session."""

    def __init__(self, driver: str) -> None:
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1250"]}
        capabilities = {
            "alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
        }
        self._http = httpx.Client(base_url=driver, timeout=90)
        answer = self._http.post("/session", json={"capabilities": capabilities}).json()
        self._session = f"/session/{answer['value']['sessionId']}"

    def post(self, command: str, **body: Any) -> Any:
        """One command's value."""
        answer = self._http.post(self._session + command, json=body)
        answer.raise_for_status()
        return answer.json()["value"]

    def run(self, script: str) -> Any:
        """What a piece of JavaScript returns."""
        return self.post("/execute/sync", script=script, args=[])

    def until(self, script: str, seconds: float = 60) -> Any:
        """The first true value of the script."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.05)
        raise SystemExit(f"not within {seconds} s: {script}")

    def screenshot(self, path: Path) -> None:
        """The window as PNG."""
        picture = self._http.get(self._session + "/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        """End the browser."""
        self._http.delete(self._session)


def main() -> None:
    """Start server and browser, look, end both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--screenshot", type=Path)
    options = parser.parse_args()
    if shutil.which("chromedriver") is None:
        subprocess.run(
            ["apt-get", "install", "--yes", "--no-install-recommends", "chromium-driver"], check=True
        )
    port, driver_port = free_port(), free_port()
    url, driver = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{driver_port}"
    server = [sys.executable, "-c", "from service.cli import main; main()", "serve", str(options.model)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        with running([*server, "--port", str(port)], log / "server.log"):
            wait_for(url + "/readyz", 180)
            with running(["chromedriver", f"--port={driver_port}"], log / "driver.log"):
                wait_for(driver + "/status", 30)
                browser = Browser(driver)
                try:
                    look(browser, url, options.screenshot)
                finally:
                    browser.close()
    print("the status page works")


def look(browser: Browser, url: str, picture: Path | None) -> None:
    """What a person would do."""
    browser.post("/url", url=url + "/")
    browser.until("return document.querySelectorAll('#layers tr').length > 0")
    state, title = browser.run("return [document.getElementById('state').textContent, document.title]")
    assert state == "ready", state
    print(title)
    browser.run("document.getElementById('send').click()")
    lengths = "return document.getElementById('answer').textContent.length"
    first = browser.until(lengths)
    browser.until("return document.getElementById('speed').textContent.includes('tokens')")
    last = browser.run(lengths)
    assert 0 < first < last, f"the answer came at once: {first}, {last} characters"
    print(browser.run("return document.getElementById('speed').textContent"))
    rate = "return Number(document.querySelector('#live dd').textContent)"
    print(
        "requests shown:",
        browser.until("return document.querySelector('#live').textContent.match(/far(.+)/)[1]"),
    )
    if picture is not None:
        browser.until("return document.querySelector('#live').children.length === 8")
        browser.screenshot(picture)
    browser.run("document.getElementById('tokens').value = 1000; document.getElementById('send').click()")
    browser.until("return document.getElementById('answer').textContent.length > 0")
    browser.until(rate)
    browser.run("document.getElementById('stop').click()")
    browser.until("return document.getElementById('speed').textContent === 'stopped'")
    entries = browser.post("/se/log", type="browser")
    bad = [entry for entry in entries if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]
    assert not bad, bad


if __name__ == "__main__":
    main()
