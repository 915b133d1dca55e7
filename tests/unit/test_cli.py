"""The command line as a user meets it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def lacunar(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LACUNAR_")}
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        capture_output=True,
        text=True,
        env={**environment, **variables, "COLUMNS": "200"},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["serve", "prune", "inspect", "demo", "bench", "version", "lacunar demo"]),
        (["serve", "--help"], ["Example", "--max-queue", "LACUNAR_MAX_QUEUE", "max_queue = 32"]),
        (["prune", "--help"], ["Example", "--sparsity", "wanda"]),
        (["inspect", "--help"], ["Example", "sparsity", "--json"]),
        (["bench", "decode", "--help"], ["Example", "transformers", "--batch"]),
        (["demo", "--help"], ["--once", "--port"]),
        (["tune", "--help"], ["Example", "XDG_CACHE_HOME", "--seconds"]),
    ],
)
def test_help_teaches(arguments, words):
    done = lacunar(*arguments)

    assert done.returncode == 0
    for word in words:
        assert word in done.stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['lacunar', '--help']\n"
        "from service.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'kernels_ext'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        (["serve"], {}, 2, ["model is not set"]),
        (["serve", "/no/such/place"], {}, 1, ["/no/such/place is no directory", "nothing is downloaded"]),
        (["serve", "m", "--max-queue", "-1"], {}, 2, ["--max-queue", "-1"]),
        (["serve", "m"], {"LACUNAR_MAX_QUEU": "1"}, 2, ["LACUNAR_MAX_QUEU", "did you mean"]),
        (["serve", "m", "--port", "many"], {}, 2, ["--port", "integer"]),
        (["nonsense"], {}, 2, ["nonsense"]),
    ],
)
def test_a_users_mistake_is_one_message(arguments, variables, code, words):
    done = lacunar(*arguments, **variables)

    assert done.returncode == code
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("backends", "text"),
    [
        ({"1": "b", "2": "b", "3-4": "b", "5-8": "dense", "9+": "dense"}, "b: 1-4, dense: 5+"),
        ({"1": "b", "2": "dense", "3+": "b"}, "b: 1, dense: 2, b: 3+"),
        ({"1": "dense", "2+": "dense"}, "dense: 1+"),
        ({}, ""),
    ],
)
def test_backends_are_shown_as_ranges_of_m(backends, text):
    from service.cli import _by_backend

    assert _by_backend(backends) == text


def test_a_checkpoint_without_a_tokenizer_is_told_before_the_model_loads(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = lacunar("serve", str(tmp_path), "--port", "0")

    assert done.returncode == 1
    assert "tokenizer" in done.stderr
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
