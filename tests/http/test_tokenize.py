"""`/tokenize`, `/detokenize`, `/health` and `/load`, in the forms of vLLM and of llama.cpp."""

from __future__ import annotations

import pytest

TEXT = "the quick fox 🦊"


async def test_a_prompt_there_and_back(client, server):
    answer = (await client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()

    assert answer["tokens"] == server.context.tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": TEXT, "content": TEXT}


async def test_llama_cpps_form_with_pieces(client, server):
    answer = (await client.post("/tokenize", json={"content": TEXT, "with_pieces": True})).json()

    raw = b""
    for token in answer["tokens"]:
        raw += bytes(token["piece"]) if isinstance(token["piece"], list) else token["piece"].encode()
    assert raw.decode() == TEXT


async def test_messages_are_rendered(client, server):
    messages = [{"role": "user", "content": "hi"}]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    await client.post("/v1/chat/completions", json={"messages": messages})

    assert answer["tokens"] == server.engine.added[0].prompt


async def test_special_tokens_are_shown_by_detokenize(client):
    assert (await client.post("/detokenize", json={"tokens": [0, 1]})).json()["prompt"] == "<s></s>"
    assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": 5}, "prompt", "string"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [99999]}, "tokens", "99999"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
        ("/detokenize", {"tokens": [1.5]}, "tokens", "integer"),
        ("/detokenize", {"tokens": [True]}, "tokens", "boolean"),
    ],
)
async def test_a_bad_field_is_named(client, path, body, param, words):
    response = await client.post(path, json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


async def test_echo_of_special_token_ids_shows_them_where_logprobs_say(client):
    body = {"prompt": [0, 5, 1], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]

    assert choice["text"].startswith("<s>")
    assert choice["text"].endswith("</s>")
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice["text"].startswith(token, offset)


async def test_load_and_health(client):
    assert (await client.get("/load")).json() == {"server_load": 0, "running": 0, "waiting": 0}
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_special_tokens_may_be_shown(client, server):
    server.engine.tokens = [5, 0, 6]
    body = {"prompt": "a", "max_tokens": 3}
    hidden = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    shown = await client.post("/v1/completions", json={**body, "skip_special_tokens": False})

    assert shown.json()["choices"][0]["text"].replace("<s>", "") == hidden
    assert "<s>" in shown.json()["choices"][0]["text"]
