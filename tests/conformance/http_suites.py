"""Other people's suites and clients against `lacunar serve`; a script, not a test of the suite.

    python -m tests.conformance.http_suites {openai|vllm|llama-cpp|lm-eval|guidellm|all} [--model DIR]
    python -m tests.conformance.http_suites report --write docs/conformance.md

Each suite gets an environment of its own under --cache, with the packages it needs from the package index;
the tests that vLLM and llama.cpp ship in their source archives are fetched and run there, and changed only by
the plug-ins in http_plugins. Lacunar itself, torch and transformers come from the environment that runs this
script. The results stay under the cache until `report` writes the page.

Without --model the demo's model is prepared and used. Exit status 1: a test did not pass and http_reasons.py
gives no reason for it, or a reason no longer applies.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import venv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance import http_guidellm, http_lm_eval
from tests.conformance.http_reasons import REASONS

SOURCE = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "http_plugins"
CHECKS = PLUGINS / "openai_checks.py"

PASSED, FAILED, OTHER = "passed", "failed", "not applicable"

# Versions are fixed, so that the reasons for tests that do not pass stay true.
OPENAI = "openai==3.63.0"
PYTEST = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0")
VLLM = "0.34.0"
LLAMA_CPP_PYTHON = "0.3.36"
LM_EVAL = "lm-eval[api]==0.4.13"
GUIDELLM = "guidellm==0.8.1"

# The files of vLLM's tests/entrypoints that speak to a server about text generation. The others need an
# encoder, images, sound, LoRA, or vLLM's own process management and Python interfaces.
VLLM_FILES = (
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
LLAMA_CPP_FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_completion.py",
    "test_ignore_eos.py",
    "test_security.py",
    "test_stream.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)


@dataclass
class Row:
    """One test: what it is called, how it ended, and why it did not pass."""

    test: str
    verdict: str
    reason: str = ""
    explained: bool = True


@dataclass
class SuiteResult:
    """All tests of one suite, and what it was run with."""

    suite: str
    versions: str
    command: str
    seconds: float
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        """Verdict -> number of tests."""
        return Counter(row.verdict for row in self.rows)


class Workplace:
    """The cache directory, and what every suite needs from it."""

    def __init__(self, cache: Path, model: Path, threads: int) -> None:
        self.threads = threads
        self.cache = cache.resolve()
        self.model = model.resolve()
        (self.cache / "results").mkdir(parents=True, exist_ok=True)

    def environment(self, name: str, packages: Sequence[str]) -> Path:
        """The interpreter of a virtual environment with `packages`, made where it is missing."""
        directory = self.cache / f"venv-{name}"
        python = directory / "bin" / "python"
        stamp = directory / "packages.json"
        if stamp.exists() and json.loads(stamp.read_text()) == list(packages):
            return python
        print(f"== {name}: installing {' '.join(packages)}", flush=True)
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        # After its own packages: torch and transformers of the environment that has Lacunar.
        path = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        (Path(path) / "lacunar_environment.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        stamp.write_text(json.dumps(list(packages)))
        return python

    def source_archive(self, package: str, version: str, wanted: str) -> Path:
        """Unpacks the members that begin with `wanted` (below the archive's top) of a package's sdist.

        pip would build a package's metadata to download it, which takes a compiler and an hour.
        """
        directory = self.cache / f"{package}-{version}"
        if directory.exists():
            return directory
        index = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        index = os.environ.get("PIP_INDEX_URL") or index or "https://pypi.org/simple"
        request = urllib.request.Request(
            f"{index.rstrip('/')}/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            files = json.load(answer)["files"]
        name = f"{package.replace('-', '_')}-{version}.tar.gz"
        entry = next(file for file in files if file["filename"] == name)
        archive = self.cache / name
        print(f"== fetching {name}", flush=True)
        with urllib.request.urlopen(entry["url"], timeout=600) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != entry["hashes"]["sha256"]:
            raise SystemExit(f"{name} is not what the index says it is: its SHA-256 differs")
        archive.write_bytes(data)
        top = name.removesuffix(".tar.gz")
        part = directory.with_suffix(".part")
        with tarfile.open(archive) as tar:
            members = [m for m in tar.getmembers() if m.name.startswith(f"{top}/{wanted}")]
            tar.extractall(part, members, filter="data")
        part.rename(directory)
        archive.unlink()
        return directory

    def variables(self, suite: str) -> dict[str, str]:
        """The environment that the plug-ins read."""
        return {
            **os.environ,
            "LACUNAR_PYTHON": sys.executable,
            "LACUNAR_SOURCE": str(SOURCE),
            "LACUNAR_MODEL": str(self.model),
            "SUITE_RESULTS": str(self.cache / "results" / f"{suite}.jsonl"),
            "SUITE_LOG": str(self.cache / "results" / f"{suite}-server.log"),
            "SUITE_THREADS": str(self.threads),
            "PYTHONPATH": str(PLUGINS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def pytest(
        self, suite: str, python: Path, directory: Path, arguments: Sequence[str], plugins: Sequence[str]
    ) -> list[Row]:
        """Run pytest in `directory` and return a row for each test."""
        variables = self.variables(suite)
        results = Path(variables["SUITE_RESULTS"])
        results.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-q", "-x" if "-x" in arguments else "--tb=short"]
        command += ["-p", "no:cacheprovider", "--timeout=180", "-o", "addopts="]
        for plugin in ("suite_results", *plugins):
            command += ["-p", plugin]
        command += [argument for argument in arguments if argument != "-x"]
        output = self.cache / "results" / f"{suite}-pytest.log"
        with output.open("wb") as log:
            status = subprocess.run(
                command, cwd=directory, env=variables, stdout=log, stderr=subprocess.STDOUT
            ).returncode
        if status not in (0, 1) or not results.exists():
            print(output.read_text(errors="replace")[-3000:])
            raise SystemExit(f"{suite}: pytest ended with status {status}")
        outcomes: dict[str, dict[str, Any]] = {}
        for line in results.read_text(encoding="utf-8").splitlines():
            outcome = json.loads(line)
            if outcome["test"] not in outcomes or outcome["outcome"] == "failed":
                outcomes[outcome["test"]] = outcome
        return [_row(outcome) for outcome in outcomes.values()]


def _row(outcome: dict[str, Any]) -> Row:
    test = outcome["test"].removeprefix("tests/entrypoints/").removeprefix("unit/")
    test = test.rpartition("http_plugins/")[2]
    if outcome["outcome"] == "passed":
        return Row(test, PASSED)
    if outcome["outcome"] == "skipped":
        return Row(test, OTHER, outcome["detail"].removeprefix("Skipped: "))
    return Row(test, FAILED, outcome["detail"], explained=False)


def explain(result: SuiteResult) -> None:
    """Give failed tests the verdicts and reasons of http_reasons.py."""
    for row in result.rows:
        for pattern, verdict, reason in REASONS.get(result.suite, ()):
            if not row.explained and _matches(row.test, pattern):
                row.verdict, row.reason, row.explained = verdict, reason, True


def _matches(test: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(test, pattern)


def _versions(python: Path, names: Sequence[str]) -> str:
    code = (
        "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    )
    return subprocess.run(
        [python, "-c", code, *names], check=True, capture_output=True, text=True
    ).stdout.strip()


def run_openai(place: Workplace) -> SuiteResult:
    """The official client, through everything that this server has."""
    python = place.environment("openai", (OPENAI, *PYTEST))
    rows = place.pytest("openai", python, PLUGINS, [str(CHECKS)], ())
    return SuiteResult("openai", _versions(python, ("openai",)), "", 0, rows)


def run_vllm(place: Workplace) -> SuiteResult:
    """vLLM's HTTP tests, from its source archive."""
    packages = (OPENAI, *PYTEST, "requests", "regex", "jsonschema", "pybase64", "prometheus-client", "httpx")
    python = place.environment("vllm", packages)
    top = place.source_archive("vllm", VLLM, "tests/") / f"vllm-{VLLM}"
    files = [f"tests/entrypoints/{name}" for name in VLLM_FILES]
    arguments = ["--noconftest", "--rootdir", str(top), "-o", "asyncio_mode=strict", *files]
    rows = place.pytest("vllm", python, top, arguments, ("vllm_suite",))
    versions = f"vllm {VLLM} (source archive), {_versions(python, ('openai',))}"
    return SuiteResult("vllm", versions, "", 0, rows)


def run_llama_cpp(place: Workplace) -> SuiteResult:
    """llama.cpp's server tests, from the source archive of llama-cpp-python."""
    packages = (OPENAI, *PYTEST, "requests", "filelock", "wget", "aiohttp", "numpy", "prometheus-client")
    python = place.environment("llama-cpp", packages)
    tests = "vendor/llama.cpp/tools/server/tests"
    archive = place.source_archive("llama-cpp-python", LLAMA_CPP_PYTHON, tests)
    directory = archive / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / tests
    files = [f"unit/{name}" for name in LLAMA_CPP_FILES]
    arguments = ["--rootdir", str(directory), *files]
    rows = place.pytest("llama-cpp", python, directory, arguments, ("llama_cpp_suite",))
    versions = f"llama-cpp-python {LLAMA_CPP_PYTHON} (source archive), {_versions(python, ('openai',))}"
    return SuiteResult("llama-cpp", versions, "", 0, rows)


def run_lm_eval(place: Workplace) -> SuiteResult:
    """lm-eval's local-completions on three tasks over the project's own texts."""
    python = place.environment("lm-eval", (LM_EVAL,))
    checks, notes = http_lm_eval.run(place.variables("lm-eval"), python, place.cache / "lm-eval")
    return _measured("lm-eval", _versions(python, ("lm_eval",)), checks, notes)


def _measured(
    suite: str, versions: str, checks: Sequence[tuple[str, bool, str]], notes: list[str]
) -> SuiteResult:
    rows = [Row(name, PASSED if fine else FAILED, reason, explained=fine) for name, fine, reason in checks]
    return SuiteResult(suite, versions, "", 0, rows, notes)


def run_guidellm(place: Workplace) -> SuiteResult:
    """guidellm with synthetic text against both endpoints."""
    python = place.environment("guidellm", (GUIDELLM,))
    checks, notes = http_guidellm.run(place.variables("guidellm"), python, place.cache / "guidellm")
    return _measured("guidellm", _versions(python, ("guidellm",)), checks, notes)


SUITES: dict[str, Callable[[Workplace], SuiteResult]] = {
    "openai": run_openai,
    "vllm": run_vllm,
    "llama-cpp": run_llama_cpp,
    "lm-eval": run_lm_eval,
    "guidellm": run_guidellm,
}


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", choices=[*SUITES, "all", "report"])
    parser.add_argument("--model", type=Path, help="directory of the served model; default: the demo's")
    parser.add_argument("--cache", type=Path, default=Path("build/http-suites"))
    parser.add_argument(
        "--threads", type=int, default=1, help="of the server; more than idle cores slow it down"
    )
    parser.add_argument("--write", type=Path, help="report: the page to write")
    options = parser.parse_args()
    if options.suite == "report":
        return report(options.cache, options.write)
    if options.model is None:
        from service.demo import prepare
        from service.pruning.progress import shown_progress

        with shown_progress() as progress:
            options.model = prepare(Path(".demo"), progress)
    place = Workplace(options.cache, options.model, options.threads)
    fine = True
    for name in SUITES if options.suite == "all" else [options.suite]:
        begin = time.monotonic()
        result = SUITES[name](place)
        result.seconds = time.monotonic() - begin
        result.command = f"python -m tests.conformance.http_suites {name}"
        (place.cache / "results" / f"{name}.json").write_text(json.dumps(asdict(result), indent=1))
        explain(result)
        print(table([result]))
        for row in result.rows:
            if not row.explained:
                print(f"FAILED, not explained: {row.test}\n    {row.reason}")
                fine = False
        for pattern in _stale(result):
            print(f"a reason in http_reasons.py explains no test that does not pass: {pattern}")
            fine = False
    return 0 if fine else 1


def _stale(result: SuiteResult) -> list[str]:
    reasons = REASONS.get(result.suite, ())
    missed = [row.test for row in result.rows if row.verdict != PASSED]
    return [pattern for pattern, _, _ in reasons if not any(_matches(test, pattern) for test in missed)]


def table(results: Sequence[SuiteResult]) -> str:
    """One line for each suite, in Markdown."""
    lines = ["| suite | passed | failed | not applicable | seconds |", "|---|---:|---:|---:|---:|"]
    for result in results:
        counts = result.counts()
        lines.append(
            f"| {result.suite} | {counts[PASSED]} | {counts[FAILED]} | {counts[OTHER]} "
            f"| {result.seconds:.0f} |"
        )
    return "\n".join(lines)


_HEAD = """# Other people's suites against this server

Written by `python -m tests.conformance.http_suites report --write docs/conformance.md` from the results of
`python -m tests.conformance.http_suites all`, with `lacunar serve` and the demo's model on loopback
(SmolLM2-135M-Instruct, half of its weights pruned, bfloat16). *Not applicable* means that a test asserts
something which is no property of an OpenAI-compatible server for text, or of this model; *failed* is a
difference that remains.

"""


def report(cache: Path, target: Path | None) -> int:
    """Write the page from the results of all suites."""
    results = []
    for name in SUITES:
        stored = cache / "results" / f"{name}.json"
        if not stored.exists():
            raise SystemExit(f"{stored} is missing: run the suite {name} first")
        fields = json.loads(stored.read_text())
        rows = [Row(**row) for row in fields.pop("rows")]
        results.append(SuiteResult(**fields, rows=rows))
        explain(results[-1])
    text = _HEAD + table(results) + "\n"
    text += f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n"
    for result in results:
        text += f"\n## {result.suite}\n\n{result.versions}. `{result.command}`\n"
        for note in result.notes:
            text += f"\n{note}\n"
        groups: dict[tuple[str, str], list[str]] = {}
        for row in result.rows:
            if row.verdict != PASSED:
                groups.setdefault((row.verdict, row.reason), []).append(row.test)
        if groups:
            text += "\n| verdict | tests | reason |\n|---|---|---|\n"
        for (verdict, reason), tests in sorted(groups.items()):
            reason = " ".join(reason.split()).replace("|", "\\|")
            text += f"| {verdict} | {_names(tests)} | {reason} |\n"
    if target is None:
        print(text)
    else:
        target.write_text(text, encoding="utf-8")
    return 0


def _names(tests: Sequence[str]) -> str:
    counts = Counter(test.rpartition("/")[2].partition("[")[0] for test in tests)
    return ", ".join(
        f"`{name}`" + (f" ({count} cases)" if count > 1 else "") for name, count in sorted(counts.items())
    )


if __name__ == "__main__":
    sys.exit(main())
