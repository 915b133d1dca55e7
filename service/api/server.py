"""`lacunar serve`: the engine's start, the socket, signals, the drain and the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from service.engine.client import EngineClient
from service.engine.protocol import LoadProgress
from service.errors import SettingsError
from service.gpu_monitor import start_gpu_monitor
from service.metrics import Metrics
from service.settings import Settings
from service.tokenization import Tokenizer

from .app import create_admin_app, create_app
from .context import ServerContext
from .defaults import load_defaults
from .protocol import limited_protocol

logger = logging.getLogger("lacunar")

EXIT_OK = 0
EXIT_ENGINE_DIED = 1

# After the engine's death open requests get this long to read their errors; after a drain that ran out of
# time, this long to be cut off.
_FAREWELL_SECONDS = 2

# Files and sockets of the process beside the connections, generously.
_OTHER_DESCRIPTORS = 256

Result = TypeVar("Result")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would close streams at once and re-raise the signal."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; tells when it is done. Raises SettingsError when the socket cannot listen."""
        try:
            await super().startup(sockets)
        except OSError as error:
            # Two sockets may be bound to one port as long as neither listens.
            raise SettingsError(
                f"cannot listen: {error.strerror}. Choose another port", param="port"
            ) from error
        self.listening.set()


async def serve(
    settings: Settings,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run a server until SIGTERM or SIGINT, or until its engine dies; returns the exit status.

    Args:
        settings: how to run.
        on_progress: told of the engine's progress while it loads the model.
        on_ready: told the server's address when it takes requests.

    Raises:
        StartupError: the port is taken, or the engine or the tokenizer cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("%s again: not waiting for open requests", number.name)
            hurry.set()
        else:
            logger.info("%s: stopping", number.name)
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    # Bound now so that a taken port is told at once, not after minutes of loading; nobody can connect
    # before uvicorn listens.
    settings.api_keys()
    tls_context(settings)
    listeners = [bind(settings.host, settings.port)]
    try:
        if settings.admin_port is not None:
            listeners.append(bind(settings.host, settings.admin_port))
        starting = asyncio.ensure_future(_start(settings, on_progress))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            _close(listeners)
            return EXIT_OK
        context = await starting
    except BaseException:
        _close(listeners)
        raise
    monitor = start_gpu_monitor(context.metrics, settings.gpu_sample_seconds, device=settings.device)
    try:
        return await serve_context(context, *listeners, stop=stop, hurry=hurry, on_ready=on_ready)
    finally:
        if monitor is not None:
            monitor.stop()
        await context.engine.stop()


async def _start(settings: Settings, on_progress: Callable[[LoadProgress], None] | None) -> ServerContext:
    # The tokenizer first: it takes a second, and a broken one should not cost the loading of the model.
    tokenizer = await _in_daemon_thread(lambda: Tokenizer.load(settings.model))
    defaults = load_defaults(settings.model)
    engine = await EngineClient.start(settings.engine_config(), on_progress=on_progress)
    return ServerContext(
        engine=engine, tokenizer=tokenizer, settings=settings, metrics=Metrics(), defaults=defaults
    )


async def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that the process does not wait for at its end, unlike asyncio.to_thread's.

    A signal while a large tokenizer loads shall end the server at once.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast(Result, result))

    def run() -> None:
        outcome: tuple[Result | None, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _close(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """For HTTPS, where certificate files are given. Raises SettingsError for files that do not fit."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key that is encrypted would make OpenSSL ask at the terminal.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the TLS files {settings.tls_certificate} and {settings.tls_key} cannot be used: {error}. "
            "Expected a PEM certificate chain and its unencrypted PEM key",
            param="tls_certificate",
        ) from error
    return context


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    tls = tls_context(settings)
    return uvicorn.Config(
        app,
        http=limited_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=_FAREWELL_SECONDS,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


def _raise_descriptor_limit(wanted: int) -> None:
    """Each connection is a file descriptor, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


async def serve_context(
    context: ServerContext,
    listener: socket.socket,
    admin_listener: socket.socket | None = None,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve a started engine on a bound socket; returns the exit status.

    Args:
        context: the server's parts.
        listener: for clients.
        admin_listener: for metrics and the like, where they are kept apart.
        stop: when set, the server drains and ends.
        hurry: when set, the drain waits no longer.
        on_ready: told the server's address when it listens.
    """
    settings = context.settings
    _raise_descriptor_limit(settings.max_connections + _OTHER_DESCRIPTORS)
    app = create_app(context)
    server = _Server(_uvicorn_config(app, settings))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    admin: _Server | None = None
    serving_admin: asyncio.Future[None] | None = None
    if admin_listener is not None:
        admin = _Server(_uvicorn_config(create_admin_app(context, app), settings))
        serving_admin = asyncio.ensure_future(admin.serve(sockets=[admin_listener]))
    stopped = asyncio.ensure_future(stop.wait())
    died = asyncio.ensure_future(context.engine.died.wait())
    listening = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not server.listening.is_set():
            await serving  # raises what ended it
        if admin is not None and serving_admin is not None:
            waiting = asyncio.ensure_future(admin.listening.wait())
            either: set[asyncio.Future[Any]] = {serving_admin, waiting}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not admin.listening.is_set():
                await serving_admin  # raises what ended it
            assert admin_listener is not None
            logger.info("metrics are on %s/metrics", _address(admin_listener, settings))
        address = _address(listener, settings)
        build = context.engine.info.build
        logger.info(
            "CPU kernels: %s; CUDA kernels: %s (%s); dispatch table: %s",
            build["cpu_isa"],
            build["cuda_kernels"],
            build["cuda_reason"],
            build["dispatch_table"],
        )
        if context.max_sequence_tokens < context.engine.info.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so no sequence can be as long as the model's %d; "
                "raise kv_cache_bytes for longer ones",
                context.max_sequence_tokens,
                context.engine.info.max_model_len,
            )
        logger.info("serving %s on %s", context.model_name, address)
        if on_ready is not None:
            on_ready(address)
        await asyncio.wait({serving, stopped, died}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises what ended it
        elif died.done():
            logger.error("%s; exiting for a restart", context.engine.failure)
            await _until(context.wait_until_idle(), _FAREWELL_SECONDS)
        else:
            await _drain(context, hurry)
        server.should_exit = True
        await serving
        if admin is not None and serving_admin is not None:
            # Last, so that the end of the others can be watched.
            admin.should_exit = True
            await serving_admin
    finally:
        futures: list[asyncio.Future[Any]] = [serving, listening, stopped, died]
        if serving_admin is not None:
            futures.append(serving_admin)
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return EXIT_ENGINE_DIED if context.engine.died.is_set() else EXIT_OK


async def _drain(context: ServerContext, hurry: asyncio.Event) -> None:
    """Take nothing new, let open requests finish within `drain_seconds`, then end the rest with an error."""
    context.draining = True
    logger.info("%d requests open, waiting up to %g s", context.requests_open, context.settings.drain_seconds)
    idle = asyncio.ensure_future(context.wait_until_idle())
    hurried = asyncio.ensure_future(hurry.wait())
    died = asyncio.ensure_future(context.engine.died.wait())
    await asyncio.wait(
        {idle, hurried, died},
        timeout=context.settings.drain_seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )
    if not idle.done():
        logger.warning("%d requests did not finish in time and get an error", context.requests_open)
        await context.engine.stop()
        await _until(context.wait_until_idle(), _FAREWELL_SECONDS)
    for future in (idle, hurried, died):
        future.cancel()


async def _until(condition: Coroutine[Any, Any, None], timeout_seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(condition, timeout_seconds)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}: {error.strerror}", param="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another with --port", param="port"
        ) from error
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_server(
    settings: Settings,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """`serve` in an event loop of its own (uvloop); see there."""
    work = serve(settings, on_progress=on_progress, on_ready=on_ready)
    return uvloop.run(work)
