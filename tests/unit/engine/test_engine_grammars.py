"""Structured output: grammars compiled apart, followed token by token, and kept from hurting anyone."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch

from service.engine import grammar_client
from service.engine.grammar_client import Grammar, GrammarClient
from service.engine.grammar_compiler import CompilerOptions
from service.engine.grammars import Grammars
from service.engine.protocol import AddGrammar, DropGrammar, SamplingParams, SetVocabulary
from service.engine.sampler import Sampler
from service.engine.sequence import Sequence
from service.errors import InvalidRequest, QueueFull
from service.tokenization import Tokenizer
from tests.http.tiny_tokenizer import write_tokenizer

EOS = 1
# More columns than the tokenizer has tokens, as models often have.
VOCAB = 417


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammars") / "tiny"
    write_tokenizer(path)
    return path


class Bench:
    """A compiler whose messages go straight into an engine's store."""

    def __init__(self, checkpoint: Path, **changes: Any) -> None:
        options = CompilerOptions(
            tokenizer=str(checkpoint), vocab_size=VOCAB, eos_token_ids=[EOS], seconds=5.0, max_bytes=2**23
        )
        self.sent: list[Any] = []
        self.store = Grammars(VOCAB)
        self.client = GrammarClient(msgspec.structs.replace(options, **changes), self.send)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        match message:
            case SetVocabulary():
                self.store.set_vocabulary(message.data)
            case AddGrammar():
                self.store.add(message.key, message.data)
            case DropGrammar():
                self.store.drop(message.key)

    @property
    def process(self) -> psutil.Process:
        assert self.client._process is not None
        return psutil.Process(self.client._process.pid)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(checkpoint: Path) -> AsyncIterator[Bench]:
    made = Bench(checkpoint)
    yield made
    await made.client.stop()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def write(bench: Bench, grammar: Grammar, tokenizer: Tokenizer, seed: int, steps: int = 200) -> str | None:
    """Let a model of random logits write until it ends; None if it does not end within `steps`."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    sequence = Sequence(
        "s",
        [5],
        SamplingParams(max_tokens=steps, seed=seed),
        eos_token_ids=(EOS,),
        constraint=bench.store.constraint(grammar.key),
    )
    logits = torch.randn(steps, VOCAB, generator=torch.Generator().manual_seed(seed))
    for row in logits:
        (sample,) = sampler.sample(row[None], [sequence])
        assert sample.error is None
        if sample.token == EOS:
            return tokenizer.decode(sequence.tokens[1 : sequence.num_tokens].tolist())
        sequence.append_token(sample.token)
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["fox", 'a "dog"', "für"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "good": {"type": "boolean"},
    },
    "required": ["name", "age", "good"],
    "additionalProperties": False,
}


async def test_random_logits_spell_what_the_schema_describes(bench: Bench, checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    grammar = await bench.client.compile("json_schema", json.dumps(SCHEMA))
    texts = [write(bench, grammar, tokenizer, seed) for seed in range(20)]

    assert None not in texts
    for text in texts:
        value = json.loads(text or "")
        assert set(value) == {"name", "age", "good"}
        assert value["name"] in SCHEMA["properties"]["name"]["enum"]  # type: ignore[index]
        assert 0 <= value["age"] <= 99
        assert isinstance(value["good"], bool)
    assert len(set(texts)) > 5


@pytest.mark.parametrize(
    ("kind", "source", "wanted"),
    [
        ("regex", r"[a-c]{2,4}-\d", r"[a-c]{2,4}-\d"),
        ("grammar", 'root ::= "yes" | "no" " " root', r"(no )*yes"),
        (
            "structural_tag",
            json.dumps(
                {"type": "structural_tag", "format": {"type": "const_string", "value": "one two three"}}
            ),
            "one two three",
        ),
    ],
)
async def test_other_grammars_are_followed_to_their_end(
    bench: Bench, checkpoint: Path, kind: Any, source: str, wanted: str
) -> None:
    import re

    tokenizer = Tokenizer.load(checkpoint)
    grammar = await bench.client.compile(kind, source)
    for seed in range(5):
        text = write(bench, grammar, tokenizer, seed)
        assert text is not None
        assert re.fullmatch(wanted, text)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "parenthesis"),
        ("regex", "a(?=b)", "Lookahead"),
        ("regex", "a$b", "'$' should be at the end"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", "{", "JSON"),
        ("json_schema", '{"type": "number", "multipleOf": 3}', "multipleOf"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "URI"),
        ("grammar", "root ::= other", "other"),
        ("grammar", "root ::= root", "matches no text"),
        ("structural_tag", '{"format": 1}', ""),
    ],
)
async def test_what_cannot_be_followed_is_refused_with_the_reason(
    bench: Bench, kind: Any, source: str, words: str
) -> None:
    """Also what the library would only warn of and leave out."""
    with pytest.raises(InvalidRequest) as refused:
        await bench.client.compile(kind, source)

    assert words in refused.value.message
    assert ".cc" not in refused.value.message
    assert bench.process.is_running()


async def test_the_same_grammar_is_compiled_once(bench: Bench) -> None:
    first, second = await asyncio.gather(
        bench.client.compile("regex", "same"), bench.client.compile("regex", "same")
    )

    assert first is second
    assert await bench.client.compile("regex", "same") is first


async def test_a_grammar_that_takes_long_is_given_up(checkpoint: Path) -> None:
    bench = Bench(checkpoint, seconds=0.05)
    try:
        with pytest.raises(InvalidRequest, match=r"longer than 0.05 s"):
            await bench.client.compile("regex", "(" * 6 + "([a-z]{1,50}[0-9])" + "{1,50})" * 6)
        # Nothing is left of it, and the compiler goes on.
        assert bench.process.children() == []
        await bench.client.compile("regex", "a")
    finally:
        await bench.client.stop()


async def test_a_large_compiled_grammar_is_refused(checkpoint: Path) -> None:
    bench = Bench(checkpoint, max_bytes=100)
    try:
        with pytest.raises(InvalidRequest, match="at most 100 are kept"):
            await bench.client.compile("json_schema", json.dumps(SCHEMA))
    finally:
        await bench.client.stop()


async def test_the_cache_is_bounded_and_the_engine_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_client, "MAX_CACHED", 2)
    bench = Bench(checkpoint)
    try:
        held = await bench.client.compile("regex", "a")
        for source in ("b", "c", "d"):
            await bench.client.compile("regex", source)
        gc.collect()
        await asyncio.sleep(0)
        # "a" was pushed out of the cache, but a request still holds it; "b" is gone.
        assert len(bench.store) == 3
        assert DropGrammar(held.key) not in bench.sent
        bench.store.constraint(held.key)
        key = held.key
        del held
        await asyncio.sleep(0)
        assert bench.sent[-1] == DropGrammar(key)
        assert len(bench.store) == 2
    finally:
        await bench.client.stop()


async def test_a_long_source_and_a_long_queue_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="at most 65536 are compiled"):
        await bench.client.compile("regex", "a" * 70_000)
    monkeypatch.setattr(grammar_client, "MAX_WAITING", 1)
    first = asyncio.ensure_future(bench.client.compile("regex", "first in the queue"))
    await asyncio.sleep(0)  # it is in the queue
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await bench.client.compile("regex", "second in the queue")
    await first


async def test_a_client_that_leaves_breaks_nothing(bench: Bench) -> None:
    leaving = asyncio.ensure_future(bench.client.compile("regex", "left behind"))
    await asyncio.sleep(0)
    leaving.cancel()
    pid = bench.process.pid
    grammar = await bench.client.compile("regex", "staying")

    assert bench.store.constraint(grammar.key)
    assert bench.process.pid == pid


async def test_the_compiler_is_started_again_after_its_death(bench: Bench) -> None:
    await bench.client.compile("regex", "before")
    bench.process.kill()
    with pytest.raises(Exception, match="compiler has failed"):
        await bench.client.compile("regex", "meanwhile")
    grammar = await bench.client.compile("regex", "after")

    assert bench.store.constraint(grammar.key)
    assert sum(isinstance(message, SetVocabulary) for message in bench.sent) == 1
