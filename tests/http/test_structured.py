"""Structured output: how requests ask for it, and the real engine following it."""

from __future__ import annotations

import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "b"}}, "regex", "b"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        (
            {"guided_choice": ["yes", "no", "yes"]},
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {
                    "type": "or",
                    "elements": [
                        {"type": "const_string", "value": "yes"},
                        {"type": "const_string", "value": "no"},
                    ],
                },
            },
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_way_of_asking_becomes_a_grammar(client, server, path, fields, kind, source):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "n": 2, **fields}
    response = await client.post(path, json=body)

    assert response.status_code == 200, response.text
    ((got_kind, got_source),) = server.engine.grammars
    assert got_kind == kind
    assert (got_source if isinstance(source, str) else json.loads(got_source)) == source
    assert [stream.sampling.grammar for stream in server.engine.added] == [0, 0]


async def test_free_text_asks_for_none(client, server):
    await client.post("/v1/completions", json={"prompt": "a", "response_format": {"type": "text"}})

    assert server.engine.grammars == []
    assert server.engine.added[0].sampling.grammar is None


async def test_without_the_library_the_answer_says_what_to_install(client, server, monkeypatch):
    monkeypatch.setattr("service.api.structured.library_is_installed", lambda: False)
    response = await client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"})

    assert response.status_code == 400
    assert "lacunar[structured]" in response.json()["error"]["message"]
