"""Bodies nobody would write: each gets an answer that is no 5xx, and the server stays whole."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 2),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS = [
    "model", "n", "best_of", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "max_tokens", "max_completion_tokens",
    "response_format", "user", "echo", "logprobs", "top_logprobs", "suffix", "tools",
]  # fmt: skip
plausible = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 500),
        "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.floats(-101, 101), max_size=3),
        "stop": st.one_of(st.text(max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=3)),
        "max_tokens": st.integers(0, 300),
        "min_tokens": st.integers(0, 20),
        "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
        "top_logprobs": st.integers(0, 5),
        "echo": st.booleans(),
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    },
)
prompts = st.one_of(
    st.text(max_size=40),
    st.lists(st.text(max_size=10), max_size=3),
    st.lists(st.integers(-2, 402), max_size=300),
    st.lists(st.lists(st.integers(-2, 402), max_size=5), max_size=3),
    values,
)
messages = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "robot"])},
            optional={"content": st.one_of(st.text(max_size=20), values), "name": scalars},
        ),
        max_size=4,
    ),
    values,
)
bodies = st.builds(
    lambda prompt, chat, sane, wild: {"prompt": prompt, "messages": chat, **sane, **wild},
    prompts,
    messages,
    plausible,
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=2),
)
raw = st.one_of(
    st.binary(max_size=60),
    bodies.map(lambda body: json.dumps(body).encode()),
    st.tuples(bodies, st.integers(0, 400)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    values.map(lambda value: json.dumps(value).encode()),
)


def finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(finite, value))
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return True


def test_no_body_causes_a_5xx(serve):
    """Several hundred bodies to both endpoints; afterwards a good request still works and no slot is lost."""
    statuses: set[int] = set()

    with asyncio.Runner() as runner:
        manager = serve()
        server = runner.run(manager.__aenter__())
        client = httpx.AsyncClient(base_url=server.url, timeout=20)

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(raw, st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
        def check(body: bytes, path: str) -> None:
            response = runner.run(
                client.post(path, content=body, headers={"Content-Type": "application/json"})
            )
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.endswith("data: [DONE]\n\n")
            else:
                assert finite(response.json())
            assert server.engine.taken == 0

        check()
        good = runner.run(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 64}))
        assert good.json()["choices"][0]["text"] == "one two three four five"
        assert {200, 400} <= statuses
        runner.run(client.aclose())
        runner.run(manager.__aexit__(None, None, None))
