"""A pytest plug-in: runs llama.cpp's server tests against Lacunar, without llama.cpp.

`utils.ServerProcess.start` starts `lacunar serve` with the settings that have a counterpart, or goes on with
the one that runs if nothing differs. The openai client's requests name the served model, as llama.cpp takes
any name. The tests compare the output with words that stories260K writes: here any text will do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lacunar_server import Server, free_port
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from suite_results import NotApplicable

NAME = "tinyllama-2"

_port = free_port()

# Attributes of llama.cpp's ServerProcess that ask for something this server is not, when they are set.
_FOREIGN = {
    "server_embeddings": "embeddings",
    "server_reranking": "reranking",
    "server_slots": "llama.cpp's /slots",
    "slot_save_path": "llama.cpp's saved slots",
    "lora_files": "LoRA adapters",
    "model_draft": "a draft model",
    "spec_type": "speculative decoding",
    "models_dir": "several models behind one address",
    "models_preset": "several models behind one address",
    "mmproj_url": "images",
    "media_path": "images",
    "enable_ctx_shift": "prompts that are cut",
    "chat_template": "a template other than the model's",
    "chat_template_file": "a template other than the model's",
    "server_tools": "tools that the server runs",
    "mcp_servers_config": "tools that the server runs",
    "mcp_servers_json": "tools that the server runs",
    "ui_mcp_proxy": "a proxy for pages",
    "gcp_compat": "Vertex AI's form",
    "sleep_idle_seconds": "unloading an idle model",
    "model_tags": "tags of models",
    "backend_sampling": "llama.cpp's samplers",
}
# llama.cpp's own endpoints; everything else that a test asks for must be here.
_FOREIGN_PATHS = {
    "/completion": "llama.cpp's own /completion",
    "/completions": "llama.cpp's own /completions (OpenAI's is /v1/completions)",
    "/apply-template": "llama.cpp's /apply-template",
    "/props": "llama.cpp's /props",
    "/slots": "llama.cpp's /slots",
    "/v1/stream": "llama.cpp's resumable streams",
    "/chat/completions/input_tokens": "llama.cpp's token counter",
}
_MODELS = ("ggml-org/test-model-stories260K", "ggml-org/models")

_server: Server | None = None


def _flags(process: Any) -> list[str]:
    for attribute, meaning in _FOREIGN.items():
        if getattr(process, attribute, None):
            raise NotApplicable(f"the test needs {meaning}")
    if process.model_hf_repo is None and process.model_alias is None:
        raise NotApplicable("the test needs several models behind one address")
    if process.model_hf_repo not in _MODELS or "split" in (process.model_hf_file or ""):
        raise NotApplicable(f"the test is about another model ({process.model_hf_repo})")
    if "," in process.server_host:
        raise NotApplicable("the test listens on two addresses")
    flags = ["--served-model-name", process.model_alias or NAME, "--threads", os.environ["SUITE_THREADS"]]
    flags += ["--kv-cache-bytes", str(2**29), "--seed", str(process.seed)]
    if process.n_ctx:
        slots = 1 if process.kv_unified else process.n_slots or 1
        flags += ["--max-model-len", str(process.n_ctx // slots)]
    if process.api_key:
        flags += ["--api-key", process.api_key]
    if process.cors_origins:
        flags += ["--cors-origins", process.cors_origins]
    if process.no_ui:
        flags += ["--no-status-page"]
    return flags


def _start(process: Any, timeout_seconds: int = 0) -> None:
    global _server
    flags = _flags(process)
    if _server is None or list(_server.flags) != flags:
        _stop_server()
        # Always the same port: some tests keep the address over a restart.
        _server = Server(flags, log=Path(os.environ["SUITE_LOG"]), port=_port)
        _server.wait_until_ready()
    process.server_port = _server.port
    process.ready = True
    _served[0] = flags[1]


_served = [NAME]


def _stop_server() -> None:
    global _server
    if _server is not None:
        status = _server.stop()
        _server = None
        assert status == 0, f"the server ended with status {status}"


def _own_paths(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(process: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Any:
        foreign = _FOREIGN_PATHS.get(path.partition("?")[0])
        # Without the right key an address must be refused whether it is there or not.
        if foreign and (not process.api_key or process.api_key in str(named.get("headers"))):
            raise NotApplicable(f"the test uses {foreign}")
        if isinstance(data, dict) and data.get("model"):
            data = {**data, "model": _served[0]}
        return call(process, method, path, data, *rest, **named)

    return checked


def _named(create: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, model: str, **named: Any) -> Any:
        return create(*arguments, model=_served[0], **named)

    return call


def pytest_configure() -> None:
    # The suite's own helper module, which its conftest and its tests import.
    sys.path.insert(0, str(Path.cwd()))
    import utils

    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = lambda process: None
    utils.ServerProcess.make_request = _own_paths(utils.ServerProcess.make_request)
    utils.ServerProcess.make_stream_request = _own_paths(utils.ServerProcess.make_stream_request)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda regex, text: isinstance(text, str) and text != ""
    Completions.create = _named(Completions.create)
    ChatCompletions.create = _named(ChatCompletions.create)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    _stop_server()
