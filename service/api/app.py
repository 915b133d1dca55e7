"""Builds the ASGI application of one server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from service import __version__
from service.errors import BodyTimeout, LacunarError, RequestTooLarge

from .context import ServerContext
from .errors import error_response
from .middleware import ApiKeyMiddleware, RequestMiddleware
from .routes import make_health_router, make_metrics_router, make_router
from .schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    ErrorDetail,
    TokenizeRequest,
)
from .status import make_status_router


def create_app(context: ServerContext) -> FastAPI:
    """The application over a started engine. Sets no signal handlers and starts nothing."""
    settings = context.settings
    apart = settings.admin_port is not None
    app = _bare_app(context, documented=not apart)
    app.include_router(make_router(context))
    app.include_router(make_health_router(context))
    if not apart:
        app.include_router(make_metrics_router(context))
        # Beside /metrics, which it shows.
        if settings.status_page:
            app.include_router(make_status_router(context))
    # The last one added is the outermost.
    if keys := settings.api_keys():
        app.add_middleware(ApiKeyMiddleware, context=context, keys=keys)
    if settings.cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in settings.cors_origins.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestMiddleware, context=context)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    context.engine.on_stats = context.metrics.observe_stats
    context.metrics.set_engine_info(context.engine.info, context.model_name)
    if settings.metrics_alias == "vllm":
        context.metrics.add_vllm_names(context.engine.info, context.model_name)
    return app


def create_admin_app(context: ServerContext, main: FastAPI) -> FastAPI:
    """What `admin_port` serves: metrics, health, and the document of the main application. Without a key:
    who may reach the port is the network's business."""
    app = _bare_app(context, documented=False)
    app.include_router(make_health_router(context))
    app.include_router(make_metrics_router(context))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(main.openapi())

    app.add_middleware(RequestMiddleware, context=context)
    return app


def _bare_app(context: ServerContext, *, documented: bool) -> FastAPI:
    # Without docs_url and redoc_url: those pages load scripts from another host.
    app = FastAPI(
        title="Lacunar",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if documented else None,
        redirect_slashes=False,
    )
    app.add_exception_handler(LacunarError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LacunarError)
    return error_response(error, close=isinstance(error, RequestTooLarge | BodyTimeout))


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
                (TokenizeRequest, "validation"),
                (DetokenizeRequest, "validation"),
                (ErrorBody, "validation"),
            ],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
