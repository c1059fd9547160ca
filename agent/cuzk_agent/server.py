"""The HTTP server: metrics, health and a small page, from callables that know what to say.

It runs in a thread of its own. hypercorn speaks the protocol; which connections are let in, and how long one may
last, is decided here: idle and half-open clients must never keep a scraper out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import html
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Event, Updated
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.typing import AppWrapper, ASGIFramework
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

logger = logging.getLogger(__name__)


class ListenError(Exception):
    """The server cannot listen on its address; the message names the address and the reason."""


class UnavailableError(Exception):
    """Raised by `Views.metrics` while there is no answer yet; the message is the body of the 503."""


@dataclass(frozen=True, slots=True)
class Views:
    """What the server serves. Each is called in a worker thread, possibly several times at once."""

    metrics: Callable[[str | None], tuple[bytes, str]]
    """From an Accept header, if there is one, to a body and its content type. May raise `UnavailableError`."""
    unhealthy: Callable[[], Sequence[str]]
    """What is broken in the agent itself, a line each; nothing when it is healthy."""
    unready: Callable[[], Sequence[str]]
    """What keeps the agent from giving full answers, a line each; nothing when it is ready."""
    facts: Callable[[], Sequence[tuple[str, str]]]
    """Names and values for the landing page, as plain text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the server its clients may use."""

    connections: int = 100
    """Open connections; a newer one replaces the one that has been idle the longest, or is closed if none is idle."""
    idle_s: float = 5.0
    """How long a connection may stay without a whole request head, at its beginning and between requests."""
    request_s: float = 30.0
    """How long a request may take, until its client has read the answer."""
    stop_s: float = 2.0
    """How long requests in progress may go on once the server stops."""
    head_bytes: int = 16 * 1024
    """Size of a request's head."""
    renders: int = 2
    """Answers to /metrics rendered at the same time; others wait for their turn."""


DEFAULT_LIMITS: Final = Limits()


class Server:
    """Serves `views` on one address, from a thread of its own, until `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        views: Views,
        *,
        limits: Limits = DEFAULT_LIMITS,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`port` 0 takes any free one. `on_failure` is called in the server's thread if that ends unexpectedly."""
        self._host = host
        self._port = port
        self._limits = limits
        self._on_failure = on_failure
        self._app = ASGIWrapper(_asgi(_application(views, limits)))
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._running = threading.Event()

    @property
    def port(self) -> int:
        """The port that is listened on; known once `start` has returned."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return _address(self._host, self._port)

    def start(self) -> None:
        """Listens, then serves. When it returns, clients can connect. Raises `ListenError`."""
        if self._thread is not None:
            raise RuntimeError("the server has been started before")
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), name="http", daemon=True)
        self._thread.start()
        self._running.wait()
        logger.info("listening on http://%s/", self.address)

    def stop(self) -> bool:
        """Ends every connection and waits for the thread, a few seconds at most. False if that was not enough."""
        thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None:
            return True
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(stopping.set)
        thread.join(self._limits.stop_s + 3.0)
        return not thread.is_alive()

    def _run(self, listener: socket.socket) -> None:
        try:
            with listener:
                asyncio.run(self._serve(listener))
        except BaseException as error:
            logger.exception("the HTTP server ended unexpectedly")
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._running.set()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        door = _Door(self._app, self._limits)
        server = await asyncio.start_server(door.admit, sock=listener, backlog=100)
        # asyncio accepts as many at a time as may wait: a few, so that those over the limit do not use up all
        # descriptors. More may wait in the kernel, where a client whose call is dropped tries again a second later.
        listener.listen(1024)
        self._running.set()
        await self._stopping.wait()
        # asyncio leaks a connection that it is about to accept when its server closes: first accept no more.
        self._loop.remove_reader(listener)
        await asyncio.sleep(0)
        server.close()
        await door.close()


class _Door:
    """Lets connections in, up to the limit, and out."""

    def __init__(self, app: AppWrapper, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._context = WorkerContext(None)
        self._config = _hypercorn_config(limits)
        self._open: set[_Connection] = set()

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection to its end."""
        if self._context.terminated.is_set() or not self._make_room():
            writer.transport.abort()
            return
        connection = _Connection(self._app, self._config, self._context, reader, writer, self._limits.request_s)
        self._open.add(connection)
        try:
            await connection.run()
        except asyncio.CancelledError:
            # It was aborted. asyncio would report a connection's task that ends as cancelled as a fault.
            pass
        except Exception:
            logger.exception("a connection ended unexpectedly")
        finally:
            self._open.discard(connection)
            connection.forget_deadline()
            writer.transport.abort()

    def _make_room(self) -> bool:
        if len(self._open) < self._limits.connections:
            return True
        idle = [connection for connection in self._open if connection.idle_since is not None]
        if not idle:
            return False
        # An aborted connection leaves `_open` a turn of the loop later: those on their way out do not count.
        min(idle, key=lambda connection: connection.idle_since or 0.0).abort()
        return True

    async def close(self) -> None:
        """Ends idle connections at once, those with a request in progress when it is answered or time is up."""
        await self._context.terminated.set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.stop_s
        # All tasks, for asyncio may still be at work on accepting a connection.
        while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and loop.time() < deadline:
            await asyncio.wait(tasks, timeout=deadline - loop.time())
        for connection in self._open:
            connection.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=0.5)


class _Connection(TCPServer):
    """One client's connection; knows since when it is idle, and ends a request that takes too long."""

    def __init__(
        self,
        app: AppWrapper,
        config: HypercornConfig,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(app, loop, config, context, {}, reader, writer)
        self._request_s = request_s
        self._deadline: asyncio.TimerHandle | None = None
        self._task = asyncio.current_task()
        self.idle_since: float | None = loop.time()
        """On the loop's clock; None while a request is in progress, or when it has been told to end."""

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.forget_deadline()
            if event.idle:
                self.idle_since = self.loop.time()
            else:
                self.idle_since = None
                self._deadline = self.loop.call_later(self._request_s, self.abort)
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        # Past the wrapper that goes over to HTTP/2, where a client that stops after its preface has no time limit.
        self.protocol = self.protocol.protocol  # type: ignore[assignment]
        with contextlib.suppress(H2CProtocolRequiredError, H2ProtocolAssumedError):
            await super()._read_data()
        # Its time limit would hold an ended connection open.
        await self.idle_task.stop()

    def abort(self) -> None:
        """Ends the connection without waiting for anything."""
        self.forget_deadline()
        self.idle_since = None
        self.writer.transport.abort()
        if self._task is not None:
            self._task.cancel()

    def forget_deadline(self) -> None:
        """Lets the request in progress, if there is one, take its time."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _hypercorn_config(limits: Limits) -> HypercornConfig:
    config = HypercornConfig()
    config.keep_alive_timeout = limits.idle_s
    config.ssl_handshake_timeout = limits.idle_s
    config.h11_max_incomplete_size = limits.head_bytes
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logger
    return config


def _asgi(app: Starlette) -> ASGIFramework:
    # starlette types its messages as mutable mappings, hypercorn as typed dicts: both mean ASGI.
    return app  # type: ignore[return-value]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"cannot listen on {_address(host, port)}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {_address(host, port)}: {error.strerror or error}") from error
    return listener


_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_PAGE_HEADERS: Final = {
    **_HEADERS,
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


def _application(views: Views, limits: Limits) -> Starlette:
    renders = asyncio.Semaphore(limits.renders)

    def metrics_now(request: Request) -> Response:
        try:
            body, content_type = views.metrics(_header(request, "accept"))
        except UnavailableError as reason:
            return _text(f"{reason}\n", 503)
        headers = {**_HEADERS, "Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if accepts_gzip(_header(request, "accept-encoding")):
            # Level 9 costs ten times as much for a third less.
            body = gzip.compress(body, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        return Response(body, headers=headers)

    async def metrics(request: Request) -> Response:
        async with renders:
            return await run_in_threadpool(metrics_now, request)

    # starlette runs these plain functions in worker threads.
    def healthy(_: Request) -> Response:
        return _health("healthy", views.unhealthy())

    def ready(_: Request) -> Response:
        return _health("ready", views.unready())

    def landing(_: Request) -> Response:
        return Response(landing_page(views.facts()), media_type="text/html", headers=_PAGE_HEADERS)

    app = Starlette(
        routes=[
            Route("/", landing),
            Route("/metrics", metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
        ],
    )
    app.router.redirect_slashes = False
    return app


def _text(text: str, status: int) -> Response:
    return PlainTextResponse(text, status, headers=_HEADERS)


def _health(name: str, reasons: Sequence[str]) -> Response:
    if reasons:
        return _text("".join(f"{reason}\n" for reason in reasons), 503)
    return _text(f"{name}\n", 200)


def _header(request: Request, name: str) -> str | None:
    """A header that may be given in several lines."""
    return ",".join(request.headers.getlist(name)) or None


def accepts_gzip(header: str | None) -> bool:
    """Whether an Accept-Encoding header allows gzip; a malformed weight forbids it."""
    weights: dict[str, float] = {}
    for element in (header or "").lower().split(","):
        coding, *parameters = (part.strip() for part in element.split(";"))
        weight = next((value for value in parameters if value.startswith("q=")), "q=1")
        try:
            weights[coding] = float(weight.removeprefix("q="))
        except ValueError:
            weights[coding] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0.0


def landing_page(facts: Sequence[tuple[str, str]]) -> str:
    """The page at `/`: links, and `facts` (plain text) as a table."""
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>\n" for name, value in facts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>cuzk-agent</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }}
th {{ text-align: left; font-weight: 600; padding-right: 1.5rem; vertical-align: top; }}
</style>
</head>
<body>
<h1>cuzk-agent</h1>
<p><a href="/metrics">Metrics</a> · <a href="/-/healthy">Healthy</a> · <a href="/-/ready">Ready</a></p>
<table>
{rows}</table>
</body>
</html>
"""
