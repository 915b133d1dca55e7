"""Builds the ASGI application of one server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from service import __version__
from service.errors import LacunarError, RequestTooLarge

from .context import ServerContext
from .errors import error_response
from .middleware import ApiKeyMiddleware, RequestMiddleware
from .routes import make_router
from .schemas import ChatCompletionRequest, CompletionRequest, ErrorBody, ErrorDetail


def create_app(context: ServerContext) -> FastAPI:
    """The application over a started engine. Sets no signal handlers and starts nothing."""
    # Without docs_url and redoc_url: those pages load scripts from another host.
    app = FastAPI(title="Lacunar", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(make_router(context))
    app.add_exception_handler(LacunarError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    # The last one added is the outermost.
    if context.settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, context=context, key=context.settings.api_key.get_secret_value())
    app.add_middleware(RequestMiddleware, context=context)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    context.engine.on_stats = context.metrics.observe_stats
    context.metrics.set_engine_info(context.engine.info, context.model_name)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LacunarError)
    return error_response(error, close=isinstance(error, RequestTooLarge))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: f"there is nothing at {request.method} {request.url.path[:200]}",
        405: f"{request.method} is not allowed at {request.url.path[:200]}",
    }
    message = known.get(error.status_code, str(error.detail))
    detail = ErrorDetail(message=message, type="invalid_request_error", param=None, code=None)
    return JSONResponse(
        ErrorBody(error=detail).model_dump(), status_code=error.status_code, headers=error.headers
    )


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [
                (CompletionRequest, "validation"),
                (ChatCompletionRequest, "validation"),
                (ErrorBody, "validation"),
            ],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
