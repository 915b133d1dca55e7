"""The endpoints."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response

from service import __version__
from service.errors import (
    BodyTimeout,
    EngineUnavailable,
    InvalidRequest,
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
    render_chat,
    tokenize_chat,
    tokenize_completion,
)
from .middleware import ClientGone, arrival_of, log_body, request_id_of
from .schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    GenerationRequest,
    Health,
    Load,
    ModelCard,
    ModelList,
    NamedToolChoice,
    Text,
    TokenizeRequest,
    TokenPiece,
    Tokens,
    Version,
)
from .streaming import EventStream, events, until_disconnect, whole_answer
from .structured import compile_wish
from .tools import tool_format_for

Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)

_DROPPED_BYTES = 1024 * 1024


class UnsupportedMediaType(LacunarError):
    """The body is announced as something else than JSON."""

    status: ClassVar[int] = 415
    error_type: ClassVar[str] = "invalid_request_error"


def _rejection_reason(error: LacunarError) -> str:
    match error:
        case RequestTooLarge():
            return "too_large"
        case BodyTimeout():
            return "body_timeout"
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
    settings = context.settings
    try:
        async with asyncio.timeout(settings.body_seconds):
            body = await _read_body(request, settings.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {settings.body_seconds:g} s") from None
    if settings.log_bodies:
        log_body(request_id_of(request.scope), body)
    try:
        parsed = body_type.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise InvalidBody("the body is nested too deeply") from None
    check_model(context, parsed.model)
    return parsed


def make_router(context: ServerContext) -> APIRouter:
    """The routes for clients of the model."""
    router = APIRouter()

    async def complete(request: Request) -> Response:
        body = await _parse(request, context, CompletionRequest)
        context.require_ready()
        prompts = await tokenize_completion(context, body)
        generation = Generation.start(
            context,
            body,
            prompts,
            arrived=arrival_of(request.scope),
            grammar=await compile_wish(context, body, None),
        )
        answer = CompletionFormat(
            generation, context.model_name, context.tokenizer, want_logprobs=body.logprobs is not None
        )
        return await respond(request, body, answer)

    async def chat(request: Request) -> Response:
        body = await _parse(request, context, ChatCompletionRequest)
        context.require_ready()
        tool_format = tool_format_for(body, context.tokenizer, context.settings.tool_format)
        prompts = await tokenize_chat(context, body)
        generation = Generation.start(
            context,
            body,
            prompts,
            arrived=arrival_of(request.scope),
            grammar=await compile_wish(context, body, tool_format),
            tool_format=tool_format,
        )
        answer = ChatFormat(
            generation,
            context.model_name,
            context.tokenizer,
            want_logprobs=bool(body.logprobs),
            named_tool=isinstance(body.tool_choice, NamedToolChoice),
        )
        return await respond(request, body, answer)

    async def respond(
        request: Request, body: GenerationRequest, answer: CompletionFormat | ChatFormat
    ) -> Response:
        deadline = arrival_of(request.scope) + context.settings.request_seconds
        if body.stream:
            options = body.stream_options
            source = events(
                answer,
                include_usage=options is not None and bool(options.include_usage),
                continuous_usage=options is not None and bool(options.continuous_usage_stats),
            )
            observe = context.metrics.token_write.observe
            return EventStream(source, deadline=deadline, observe_write=observe)
        return await until_disconnect(whole_answer(answer), request.receive, deadline)

    async def tokenize_text(request: Request) -> Response:
        body = await _parse(request, context, TokenizeRequest)
        tokens = await _tokens_of(context, body)
        texts = None
        if body.return_token_strs:
            texts = [context.tokenizer.token_text(token_id) for token_id in tokens]
        answer = Tokens(
            tokens=[_piece(context, token_id) for token_id in tokens] if body.with_pieces else tokens,
            count=len(tokens),
            max_model_len=context.max_sequence_tokens,
            token_strs=texts,
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def detokenize_tokens(request: Request) -> Response:
        body = await _parse(request, context, DetokenizeRequest)
        vocabulary = context.engine.info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocabulary:
                raise InvalidRequest(
                    f"tokens has token id {token_id}, but this model's token ids are 0 to {vocabulary - 1}",
                    param="tokens",
                )
        decode = functools.partial(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await asyncio.to_thread(decode)
        return Response(Text(prompt=text, content=text).model_dump_json(), media_type="application/json")

    async def counted(answer: Coroutine[Any, Any, Response]) -> Response:
        try:
            return await answer
        except LacunarError as error:
            if error.status not in (500, 504):
                context.metrics.rejections.labels(_rejection_reason(error)).inc()
            raise

    @router.post("/v1/completions", response_model=Completion, **_posts(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        return await counted(complete(request))

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", response_model=ChatCompletion, **_posts(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        return await counted(chat(request))

    @router.post("/tokenize", response_model=Tokens, **_posts(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation by the model's chat template."""
        return await counted(tokenize_text(request))

    @router.post("/detokenize", response_model=Text, **_posts(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        return await counted(detokenize_tokens(request))

    def card() -> ModelCard:
        return ModelCard(
            id=context.model_name, created=context.created, max_model_len=context.max_sequence_tokens
        )

    @router.get("/models", include_in_schema=False)
    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """The served model."""
        return ModelList(data=[card()])

    @router.get("/v1/models/{name:path}", responses=_ERRORS)
    async def get_model(name: str) -> ModelCard:
        """The served model, by name."""
        check_model(context, name)
        return card()

    @router.get("/load")
    async def load() -> Load:
        """How busy the server is: for whoever spreads requests over several."""
        stats = context.engine.stats
        return Load(server_load=context.requests_open - 1, running=stats.running, waiting=stats.waiting)

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


def make_health_router(context: ServerContext) -> APIRouter:
    """The routes for orchestrators."""
    router = APIRouter()

    @router.get("/livez", response_model=Health, responses=_UNHEALTHY)
    async def livez() -> Response:
        """200 while the engine lives; 503 when only a restart can help."""
        return _health(context.not_live_reason())

    @router.get("/health", response_model=Health, responses=_UNHEALTHY)
    @router.get("/readyz", response_model=Health, responses=_UNHEALTHY)
    async def readyz() -> Response:
        """200 while requests are taken; 503 also while the server drains."""
        return _health(context.not_ready_reason())

    return router


def make_metrics_router(context: ServerContext) -> APIRouter:
    """The route for Prometheus."""
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text 0.0.4."""
        context.metrics.engine_up.set(context.engine.alive)
        context.metrics.engine_heartbeat_age.set(context.engine.heartbeat_age_seconds)
        return Response(context.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    return router


async def _tokens_of(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return await render_chat(context, body.template_fields())
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        text, special = body.content or "", bool(body.add_special)
    return await asyncio.to_thread(context.tokenizer.encode, text, add_special_tokens=special)


def _piece(context: ServerContext, token_id: int) -> TokenPiece:
    raw = context.tokenizer.token_bytes(token_id)
    try:
        return TokenPiece(id=token_id, piece=raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token_id, piece=list(raw))


def _health(problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse(Health(status="ok").model_dump(exclude_none=True))
    return JSONResponse(Health(status="unavailable", reason=problem).model_dump(), status_code=503)


_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "What was wrong."}}
_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Why not."}}


def _posts(model: type[BaseModel]) -> dict[str, Any]:
    # The routes read their bodies themselves (for the limit and for JSON's NaN), so the document is told.
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    responses = dict(_ERRORS)
    if issubclass(model, GenerationRequest):
        responses[200] = {
            "description": "The whole answer, or with `stream` a server-sent event for each part of it.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}, "responses": responses}
