"""schemathesis over the OpenAPI document of a running server; a script, not a test of the suite.

    python -m tests.conformance.schema_fuzz --seed 1
    python -m tests.conformance.schema_fuzz --schemathesis VENV/bin/schemathesis

Without --schemathesis it is installed into an environment of its own, which goes away again. A tiny model
is served; requests are made from the document, valid ones and spoiled ones. No answer may be a 5xx, have a
status, a content type or a shape that the document does not name, or take what the document forbids.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import httpx

from .tiny_server import tiny_server

SCHEMATHESIS = "schemathesis==4.32.5"

# Not among them: positive_data_acceptance. Whether a request is taken also depends on what a JSON schema
# cannot say: the model's name, vocabulary and context length, and which fields go together.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)


def install(directory: Path) -> Path:
    """schemathesis's program, in a new environment there."""
    venv.create(directory, with_pip=True)
    subprocess.run([directory / "bin" / "pip", "install", "-q", SCHEMATHESIS], check=True)
    return directory / "bin" / "schemathesis"


def run(program: Path, examples: int, seed: int, report: Path | None) -> int:
    """Serve and test; returns 0 where nothing was found and the server is whole."""
    with tiny_server(max_model_len=128, max_choices=8, max_queue=32, body_seconds=5) as server:
        command: list[str | Path] = [
            program, "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS),
            "--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--seed", str(seed),
            "--generation-database", "none", "--continue-on-failure", "--warnings", "off",
            "--request-timeout", "60",
        ]  # fmt: skip
        if report is not None:
            command += ["--report", "junit", "--report-junit-path", report]
        began = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        print(f"schemathesis ended with {status} after {time.monotonic() - began:.0f} s")
        good = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=good, timeout=60)
        stopped = server.stop()
        complaints = server.complaints()
        print(*complaints, sep="\n")
        if answer.status_code != 200 or stopped != 0 or complaints:
            print(f"the server is not whole: {answer.status_code} {answer.text}, exit status {stopped}")
            return 1
    return status


def main() -> int:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemathesis", type=Path, help="the installed program")
    parser.add_argument("--examples", type=int, default=200, help="for each operation, in the fuzzing phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write a JUnit report here")
    options = parser.parse_args()
    if options.schemathesis is not None:
        return run(options.schemathesis, options.examples, options.seed, options.report)
    with tempfile.TemporaryDirectory() as directory:
        return run(install(Path(directory)), options.examples, options.seed, options.report)


if __name__ == "__main__":
    sys.exit(main())
