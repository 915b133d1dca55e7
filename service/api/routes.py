"""The endpoints."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from service import __version__
from service.errors import (
    EngineUnavailable,
    LacunarError,
    ModelNotFound,
    QueueFull,
    RequestTooLarge,
)
from service.metrics import CONTENT_TYPE

from .answers import ChatFormat, CompletionFormat
from .context import ServerContext
from .errors import InvalidBody, from_validation
from .generation import (
    Generation,
    check_model,
    tokenize_chat,
    tokenize_completion,
)
from .middleware import ClientGone, arrival_of
from .schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
    Version,
)
from .streaming import EventStream, events, until_disconnect, whole_answer

Body = TypeVar("Body", bound=GenerationRequest)

_DROPPED_BYTES = 1024 * 1024


class UnsupportedMediaType(LacunarError):
    """The body is announced as something else than JSON."""

    status: ClassVar[int] = 415
    error_type: ClassVar[str] = "invalid_request_error"


def _rejection_reason(error: LacunarError) -> str:
    match error:
        case RequestTooLarge():
            return "too_large"
        case ModelNotFound():
            return "model_not_found"
        case QueueFull():
            return "queue_full"
        case EngineUnavailable():
            return "unavailable"
        case _:
            return "invalid"


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, counted while it comes in. Raises ClientGone when the client leaves before its end."""
    # Some more than allowed is read and dropped: most clients look for an answer only after they have sent
    # all, and a connection closed under them would hide the 413.
    dropped_bytes = max(limit_bytes, _DROPPED_BYTES)
    body = bytearray()
    received = 0
    try:
        async for part in request.stream():
            received += len(part)
            if received <= limit_bytes:
                body += part
            elif received > limit_bytes + dropped_bytes:
                break
    except ClientDisconnect:
        raise ClientGone from None
    if received > limit_bytes:
        raise RequestTooLarge(f"the body is larger than the {limit_bytes} bytes that this server accepts")
    return bytes(body)


async def _parse(request: Request, context: ServerContext, body_type: type[Body]) -> Body:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking; a page must not be able to use a local server.
    if content_type != "application/json":
        raise UnsupportedMediaType("the body must be JSON, announced as 'Content-Type: application/json'")
    body = await _read_body(request, context.settings.max_body_bytes)
    try:
        parsed = body_type.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise InvalidBody("the body is nested too deeply") from None
    check_model(context, parsed.model)
    return parsed


def make_router(context: ServerContext) -> APIRouter:
    """The routes of one server."""
    router = APIRouter()

    async def complete(request: Request) -> Response:
        body = await _parse(request, context, CompletionRequest)
        context.require_ready()
        prompts = await tokenize_completion(context, body)
        generation = Generation.start(context, body, prompts, arrived=arrival_of(request.scope))
        answer = CompletionFormat(
            generation, context.model_name, context.tokenizer, want_logprobs=body.logprobs is not None
        )
        return await _respond(request, body, answer)

    async def chat(request: Request) -> Response:
        body = await _parse(request, context, ChatCompletionRequest)
        context.require_ready()
        prompts = await tokenize_chat(context, body)
        generation = Generation.start(context, body, prompts, arrived=arrival_of(request.scope))
        answer = ChatFormat(
            generation, context.model_name, context.tokenizer, want_logprobs=bool(body.logprobs)
        )
        return await _respond(request, body, answer)

    async def _respond(
        request: Request, body: GenerationRequest, answer: CompletionFormat | ChatFormat
    ) -> Response:
        if body.stream:
            options = body.stream_options
            include_usage = options is not None and bool(options.include_usage)
            return EventStream(events(answer, include_usage=include_usage))
        return await until_disconnect(whole_answer(answer), request.receive)

    def _count(error: LacunarError) -> None:
        if error.status != 500:
            context.metrics.rejections.labels(_rejection_reason(error)).inc()

    @router.post("/v1/completions", response_model=Completion, openapi_extra=_body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        try:
            return await complete(request)
        except LacunarError as error:
            _count(error)
            raise

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        openapi_extra=_body_of(ChatCompletionRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        try:
            return await chat(request)
        except LacunarError as error:
            _count(error)
            raise

    def card() -> ModelCard:
        return ModelCard(
            id=context.model_name, created=context.created, max_model_len=context.max_sequence_tokens
        )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """The served model."""
        return ModelList(data=[card()])

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> ModelCard:
        """The served model, by name."""
        check_model(context, name)
        return card()

    @router.get("/livez")
    async def livez() -> Response:
        """200 while the engine lives; 503 when only a restart can help."""
        return _health(context.not_live_reason())

    @router.get("/readyz")
    async def readyz() -> Response:
        """200 while requests are taken; 503 also while the server drains."""
        return _health(context.not_ready_reason())

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text 0.0.4."""
        context.metrics.engine_up.set(context.engine.alive)
        context.metrics.engine_heartbeat_age.set(context.engine.heartbeat_age_seconds)
        return Response(context.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/version")
    async def version() -> Version:
        """What runs here."""
        info = context.engine.info
        return Version(
            version=__version__,
            model=context.model_name,
            architecture=info.architecture,
            implementation=info.implementation,
            device=info.device,
            dtype=info.dtype,
            build=info.build,
        )

    return router


def _health(problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse(Health(status="ok").model_dump(exclude_none=True))
    return JSONResponse(Health(status="unavailable", reason=problem).model_dump(), status_code=503)


def _body_of(model: type[GenerationRequest]) -> dict[str, Any]:
    # The routes read their bodies themselves (for the limit and for JSON's NaN), so the document is told.
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
