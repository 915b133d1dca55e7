"""The status page at `/`: one static file, and `/status.json` with what it shows beside /metrics."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from service import __version__

from .context import ServerContext

# The page loads nothing, from here or elsewhere; it only asks this server.
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def _page() -> bytes:
    return files(__package__).joinpath("status.html").read_bytes()


def make_status_router(context: ServerContext) -> APIRouter:
    """The page and its data."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(_page(), headers=_HEADERS)

    @router.get("/status.json", include_in_schema=False)
    async def status() -> JSONResponse:
        return JSONResponse(_status(context))

    return router


def _status(context: ServerContext) -> dict[str, Any]:
    info = context.engine.info
    # A large model has hundreds of layers; those of one kind are one line.
    kinds: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for layer in info.layers:
        short = layer.name.rpartition(".")[2]
        kinds[short, layer.N, layer.K, layer.format, tuple(layer.backends.items())].append(layer)
    layers = [
        {
            "name": name,
            "count": len(group),
            "N": N,
            "K": K,
            "format": form,
            "sparsity": sum(layer.sparsity for layer in group) / len(group),
            "dense_bytes": sum(layer.dense_bytes for layer in group),
            "stored_bytes": sum(layer.stored_bytes for layer in group),
            "backends": dict(backends),
        }
        for (name, N, K, form, backends), group in kinds.items()
    ]
    return {
        "version": __version__,
        "model": context.model_name,
        "architecture": info.architecture,
        "implementation": info.implementation,
        "device": info.device,
        "dtype": info.dtype,
        "max_sequence_tokens": context.max_sequence_tokens,
        "dense_bytes": info.dense_bytes,
        "stored_bytes": info.stored_bytes,
        "build": info.build,
        "problem": context.not_ready_reason(),
        "layers": layers,
    }
