"""The demo's model as served over HTTP, against transformers on the same pruned weights in float32.

Needs what `make demo` leaves behind; `.ci/run` runs the demo first.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.model.loader import load_model
from service.pruning.pack import unpack
from tests.conformance.tiny_models import PagedRun
from tests.http.test_end_to_end import Process, launch

PACKED = Path(__file__).parents[2] / ".demo" / "smollm2-135m-instruct-wanda50"
NEW_TOKENS = 64
LOGIT_TOLERANCE = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Water boils at",
    "The best way to learn a new language is",
    "def fibonacci(n):",
    "In the beginning",
    "Roses are red,",
    "A long time ago in a small village by the sea, an old fisherman told the children that",
)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not PACKED.is_dir(), reason=f"no {PACKED}: run `make demo ONCE=1` first"),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed model as ordinary safetensors with zeros."""
    path = tmp_path_factory.mktemp("dense") / "model"
    unpack(PACKED, path)
    return path


@pytest.fixture(scope="module")
def reference(dense: Path) -> Any:
    """transformers' model on the dense weights, float32."""
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The model's own."""
    return AutoTokenizer.from_pretrained(PACKED)


@pytest.fixture(scope="module")
def expected(reference: Any, tokenizer: Any) -> list[str]:
    """What transformers continues each prompt with, greedily and past any end of sequence."""
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        # Decoding everything and cutting the prompt off keeps a leading space.
        whole = tokenizer.decode(out[0], skip_special_tokens=True)
        texts.append(whole[len(tokenizer.decode(ids[0], skip_special_tokens=True)) :])
    return texts


@pytest.fixture(scope="module")
def server() -> Any:
    """`lacunar serve` of the packed model in float32."""
    yield from launch(PACKED, "--dtype", "float32", "--max-model-len", "512")


def complete(server: Process, prompt: str) -> str:
    """One greedy completion of exactly NEW_TOKENS tokens."""
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == NEW_TOKENS
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_logits_equal_transformers(reference: Any, tokenizer: Any) -> None:
    """Every prompt's last-token logits, compressed weights against dense ones."""
    model = load_model(PACKED, dtype="float32", max_model_len=512)
    worst = 0.0
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt).input_ids
        with torch.inference_mode():
            want = reference(torch.tensor([ids])).logits[0]
        got = PagedRun(model).step({str(index): ids})[str(index)]
        worst = max(worst, float((got - want).abs().max()))

    assert worst <= LOGIT_TOLERANCE


def test_greedy_text_equals_transformers_alone_and_in_company(server: Process, expected: list[str]) -> None:
    """A sequence's text must not depend on what else runs beside it."""
    alone = [complete(server, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))

    assert alone == expected
    assert together == expected


def test_packed_layers_take_at_most_six_tenths() -> None:
    """Half the values at 16 bits and one bit an element are 0.5625 of dense, and a little for the offsets."""
    from service.model.inspect import inspect_checkpoint

    packed = [layer for layer in inspect_checkpoint(PACKED).layers if layer.format == "bitmap"]

    assert len(packed) >= 30 * 4
    assert sum(layer.stored_bytes for layer in packed) <= 0.60 * sum(layer.dense_bytes for layer in packed)


def test_config_names_the_packed_form() -> None:
    """Other readers find out from the config that they cannot read it as dense weights."""
    config = json.loads((PACKED / "config.json").read_text())

    assert config["quantization_config"]["quant_method"] == "lacunar"
    assert config["quantization_config"]["format_version"] == 1
