"""lm-eval's local-completions on three tasks over the project's own texts, for http_suites.py.

Rolling perplexity of the held-out text must be within 1 % of the one that the pruning report measures in
float32, a continuation must be told from three others more often than not, and generation must end where
plain requests cut at the stop strings end. The tokenizer is the served model's, offline.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from service.data import HELDOUT_TEXT
from tests.conformance.http_plugins.lacunar_server import Server

NAME = "served"
# The two cut the text at different places: with short windows, which are many, that hardly shows.
CONTEXT_TOKENS = 256
QUESTIONS = 24
PROMPTS = 8
NEW_TOKENS = 24
ALLOWED = 0.01

_ROLLING = """task: lacunar_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: byte_perplexity}}
"""
_CHOICE = """task: lacunar_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
target_delimiter: " "
metric_list:
  - {{metric: acc}}
"""
_GENERATE = """task: lacunar_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{begin}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: [".", "\\n"], max_gen_toks: {new_tokens}, temperature: 0}}
metric_list:
  - {{metric: exact_match}}
"""


def _write_task(directory: Path, name: str, yaml: str, rows: list[dict[str, Any]]) -> None:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / f"{name}.yaml").write_text(yaml.format(data=data, new_tokens=NEW_TOKENS), encoding="utf-8")


def _sentences(text: str) -> list[list[str]]:
    """Words of the text's sentences that are long enough to be cut in two."""
    words = [sentence.split() for sentence in text.replace("\n", " ").split(". ")]
    return [sentence for sentence in words if 14 <= len(sentence) <= 40 and sentence[0][0].isalpha()]


def _complete(url: str, prompt: str) -> str:
    body = {"model": NAME, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def _until(text: str) -> str:
    return text[: min((at for at in (text.find("."), text.find("\n")) if at >= 0), default=len(text))]


def _report_perplexity(model: Path, text: Path) -> float:
    from service.pruning.report import PerplexityOptions, perplexity

    return perplexity(model, PerplexityOptions(text=text, context_tokens=CONTEXT_TOKENS)).perplexity


def run(
    variables: dict[str, str], python: Path, directory: Path
) -> tuple[list[tuple[str, bool, str]], list[str]]:
    """Write the tasks, serve the model, run lm-eval and check what it says.

    Returns:
        (name, whether it holds, what was measured) for each task; and lines for the page.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = Path(variables["LACUNAR_MODEL"])
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    sentences = _sentences(text)[: QUESTIONS * 4]
    questions = []
    for number in range(QUESTIONS):
        four = [sentences[(number + step * QUESTIONS) % len(sentences)] for step in range(4)]
        ends = [" ".join(words[8:]) for words in four]
        right = number % 4
        ends[0], ends[right] = ends[right], ends[0]
        questions.append({"begin": " ".join(four[0][:8]), "ends": ends, "right": right})
    begins = [" ".join(words[:9]) for words in sentences[:PROMPTS]]
    tasks = directory / "tasks"
    tasks.mkdir(exist_ok=True)
    log = Path(variables["SUITE_LOG"])
    os.environ.update({key: variables[key] for key in ("LACUNAR_PYTHON", "LACUNAR_SOURCE", "LACUNAR_MODEL")})
    flags = ("--served-model-name", NAME, "--max-model-len", "2048", "--kv-cache-bytes", str(2**29))
    flags += ("--threads", variables["SUITE_THREADS"])
    with Server(flags, log=log) as server:
        expected = [_until(_complete(server.url, begin)) for begin in begins]
        _write_task(tasks, "rolling", _ROLLING, [{"text": text}])
        _write_task(tasks, "choice", _CHOICE, questions)
        _write_task(
            tasks,
            "generate",
            _GENERATE,
            [{"begin": begin, "target": end} for begin, end in zip(begins, expected, strict=True)],
        )
        # Of max_length lm-eval keeps one token for generation and one for the context of a window, so that
        # its requests have CONTEXT_TOKENS tokens and predict one less, as the report's windows do.
        arguments = {
            "model": NAME,
            "base_url": server.url + "/v1/completions",
            "tokenizer": str(model),
            "tokenizer_backend": "huggingface",
            "max_length": CONTEXT_TOKENS + 1,
            "num_concurrent": 4,
            "max_retries": 1,
        }
        command = [str(python), "-m", "lm_eval", "run", "--model", "local-completions", "--log_samples"]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--include_path", str(tasks), "--output_path", str(directory / "out.json")]
        command += ["--tasks", "lacunar_rolling,lacunar_choice,lacunar_generate"]
        output = log.with_name("lm-eval.log")
        with output.open("wb") as lines:
            environment = {
                **variables,
                "OPENAI_API_KEY": "none",
                "HF_DATASETS_OFFLINE": "1",
                "PYTHONPATH": "",
            }
            status = subprocess.run(command, stdout=lines, stderr=lines, env=environment).returncode
    if status != 0:
        print(output.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise SystemExit(f"lm-eval ended with status {status}")
    written = max(directory.glob("out_*.json"), key=lambda path: path.stat().st_mtime)
    results = json.loads(written.read_text(encoding="utf-8"))["results"]
    accuracy = results["lacunar_choice"]["acc,none"]
    exact = results["lacunar_generate"]["exact_match,none"]
    nll = math.log(results["lacunar_rolling"]["byte_perplexity,none"]) * len(text.encode())
    from transformers import AutoTokenizer

    tokens = len(AutoTokenizer.from_pretrained(model)(text, verbose=False).input_ids)
    served = math.exp(nll / tokens)
    report = _report_perplexity(model, HELDOUT_TEXT)
    apart = served / report - 1
    checks = [
        ("rolling perplexity", abs(apart) <= ALLOWED, f"{served:.3f} against {report:.3f}: {apart:+.2%}"),
        ("multiple choice", accuracy > 0.5, f"accuracy {accuracy:.2f} of {QUESTIONS} questions, chance 0.25"),
        ("generate until", exact == 1, f"{exact:.0%} of {PROMPTS} end where the plain answers do"),
    ]
    notes = [
        f"- Perplexity of the held-out text ({tokens} tokens) in windows of {CONTEXT_TOKENS}: {served:.3f} "
        f"through lm-eval and this server, {report:.3f} by the code of `lacunar prune --report` (float32): "
        f"{apart:+.2%}, allowed {ALLOWED:.0%}.",
        f"- Multiple choice: accuracy {accuracy:.2f} over {QUESTIONS} questions with four answers.",
        f"- Generation until a stop string: {exact:.0%} of {PROMPTS} answers are the plain ones, cut there.",
    ]
    return checks, notes
