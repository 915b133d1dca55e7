"""Keys, the admin port, other origins, TLS, and what the log says."""

from __future__ import annotations

import io
import json
import logging
import subprocess
from pathlib import Path

import httpx
import pytest

from service.api.server import tls_context
from service.errors import SettingsError
from service.logs import JsonFormatter
from service.settings import Settings

BODY = {"prompt": "secret words", "max_tokens": 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer one,two"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"X-Api-Key": "three"}, 200),
        ({"X-Api-Key": "four"}, 401),
        ({"Authorization": "Bearer # four"}, 401),
    ],
)
async def test_any_of_several_keys_opens_the_server(serve, tmp_path, headers, status):
    file = tmp_path / "keys"
    file.write_text("# four\nthree\n\n")
    async with serve(api_key="one,two", api_key_file=file) as server:
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
            response = await client.post("/v1/completions", json=BODY)
            assert response.status_code == status
            assert (await client.get("/health")).status_code == 200
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/load", "/openapi.json", "/nothing", "/livez/", "//livez"]
)
async def test_without_a_key_everything_else_is_denied(serve, path):
    async with serve(api_key="one") as server, httpx.AsyncClient() as client:
        assert (await client.get(server.url + path)).status_code == 401


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("# none\n", "no API key"), ("a b\n", "line 1")]
)
def test_a_key_file_that_opens_the_server_to_all_is_refused(tmp_path, content, words):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    settings = Settings(model=tmp_path, api_key_file=file)

    with pytest.raises(SettingsError, match=words):
        settings.api_keys()


async def test_metrics_and_the_document_move_to_the_admin_port(serve):
    async with serve(admin_port=0) as server, httpx.AsyncClient() as client:
        for path in ("/metrics", "/openapi.json"):
            assert (await client.get(server.url + path)).status_code == 404
            assert (await client.get(server.admin_url + path)).status_code == 200
        for path in ("/livez", "/readyz", "/health"):
            assert (await client.get(server.url + path)).status_code == 200
            assert (await client.get(server.admin_url + path)).status_code == 200
        assert (await client.post(server.admin_url + "/v1/completions", json=BODY)).status_code == 404
        document = (await client.get(server.admin_url + "/openapi.json")).json()
        assert "/v1/completions" in document["paths"]


async def test_other_origins_are_not_let_in_unless_told(serve):
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with serve() as server, httpx.AsyncClient(base_url=server.url) as client:
        preflight = await client.options("/v1/completions", headers=headers)
        plain = await client.post("/v1/completions", json=BODY, headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in preflight.headers
        assert "access-control-allow-origin" not in plain.headers
    async with (
        serve(cors_origins="https://a.example, https://b.example", api_key="k") as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        # A browser asks without the key.
        preflight = await client.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.options("/v1/completions", headers={**headers, "Origin": "https://c.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(chain)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return chain, key


async def test_https_by_certificate_files(serve, certificate):
    import ssl

    chain, key = certificate
    async with serve(tls_certificate=chain, tls_key=key) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(base_url=server.url, verify=trusted) as client:
            response = await client.post("/v1/completions", json=BODY)
            assert response.status_code == 200


def test_tls_files_that_do_not_fit_are_a_clear_error(certificate, tmp_path):
    chain, key = certificate
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    with pytest.raises(SettingsError, match="cannot be used"):
        tls_context(Settings(model=tmp_path, tls_certificate=chain, tls_key=wrong))
    with pytest.raises(SettingsError, match="No such file"):
        tls_context(Settings(model=tmp_path, tls_certificate=tmp_path / "none.pem", tls_key=key))
    with pytest.raises(ValueError, match="only of use together"):
        Settings(model=tmp_path, tls_certificate=chain)


async def test_the_log_has_no_text_of_prompts_unless_asked(serve, caplog):
    caplog.set_level(logging.DEBUG, logger="lacunar")
    async with serve() as server, httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "r1"})
    assert "r1" in caplog.text
    assert "secret words" not in caplog.text
    async with serve(log_bodies=True) as server, httpx.AsyncClient(base_url=server.url) as client:
        await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "r2"})
    assert "body of r2" in caplog.text
    assert "secret words" in caplog.text


def test_json_log_lines_are_objects_with_the_requests_fields():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.Logger("lacunar.access")
    log.addHandler(handler)
    log.info("GET %r", "/a\nb", extra={"fields": {"status": 200, "request_id": "r1"}})
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")

    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "GET '/a\\nb'"
    assert first["status"] == 200
    assert first["request_id"] == "r1"
    assert first["level"] == "INFO"
    assert first["time"].endswith("+00:00")
    assert "ValueError: boom" in second["exception"]
