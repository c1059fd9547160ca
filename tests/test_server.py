"""The HTTP server, through real sockets."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser

import pytest

from cuzk_agent.server import Limits, ListenError, Server, UnavailableError, Views, accepts_gzip, landing_page

BODY = b"# HELP cuzk_up Up.\n" * 100
ANSWER_S = 20.0
"""How long a client of these tests waits for what must come."""


def metrics(accept: str | None) -> tuple[bytes, str]:
    return (BODY, "text/plain; version=0.0.4; charset=utf-8") if accept is None else (accept.encode(), "x/accept")


class World:
    """What the server is asked about, to be changed by a test, and the server."""

    def __init__(self) -> None:
        self.metrics: Callable[[str | None], tuple[bytes, str]] = metrics
        self.unhealthy: list[str] = []
        self.unready: list[str] = []
        self.facts: list[tuple[str, str]] = []
        self.failures: list[BaseException] = []
        self.servers: list[Server] = []

    def serve(self, limits: Limits | None = None, host: str = "127.0.0.1", port: int = 0) -> Server:
        views = Views(
            metrics=lambda accept: self.metrics(accept),  # noqa: PLW0108  tests replace it
            unhealthy=lambda: self.unhealthy,
            unready=lambda: self.unready,
            facts=lambda: self.facts,
        )
        server = Server(host, port, views, limits=limits or Limits(), on_failure=self.failures.append)
        self.servers.append(server)
        server.start()
        return server


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    stopped = [server.stop() for server in world.servers]
    assert all(stopped)
    assert world.failures == []


Answer = tuple[int, dict[str, str], bytes]


def ask(server: Server, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    with contextlib.closing(client):
        client.request(method, path, headers=headers or {})
        answer = client.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_S)


def read_to_end(client: socket.socket) -> bytes:
    """All that the server sends until it closes; fails if it doesn't close."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
    return received


# --- what it answers


def test_metrics_are_what_the_view_renders(world: World) -> None:
    status, headers, body = ask(world.serve(), "/metrics")
    assert (status, body) == (200, BODY)
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["content-length"] == str(len(BODY))
    assert headers["vary"] == "Accept, Accept-Encoding"
    assert "content-encoding" not in headers
    assert "server" not in headers


def test_the_accept_header_reaches_the_view(world: World) -> None:
    server = world.serve()
    malformed = "application/openmetrics-text;version=1.x.0;;=,"
    assert ask(server, "/metrics", headers={"Accept": malformed})[2] == malformed.encode()
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: a/b\r\nAccept: c/d\r\nConnection: close\r\n\r\n")
        assert read_to_end(client).endswith(b"\r\n\r\na/b,c/d")


def test_metrics_are_compressed_for_those_who_ask(world: World) -> None:
    _, headers, body = ask(world.serve(), "/metrics", headers={"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert len(body) < len(BODY)
    assert gzip.decompress(body) == BODY


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("br;q=1.0, *;q=0.1", True),
        ("gzip;q=high", False),
        ("gzip;q=nan", False),
        ("gzipped", False),
        (";;,=,q=", False),
    ],
)
def test_accept_encoding(header: str | None, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted


def test_metrics_that_are_not_there_yet(world: World) -> None:
    def not_yet(_: str | None) -> tuple[bytes, str]:
        raise UnavailableError("catching up with prover-1")

    world.metrics = not_yet
    status, headers, body = ask(world.serve(), "/metrics")
    assert (status, body) == (503, b"catching up with prover-1\n")
    assert headers["content-type"] == "text/plain; charset=utf-8"


def test_a_view_that_fails_is_a_500_and_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: str | None) -> tuple[bytes, str]:
        raise KeyError("secret")

    world.metrics = fail
    server = world.serve()
    status, _, body = ask(server, "/metrics")
    assert status == 500
    assert b"secret" not in body
    assert ask(server, "/-/healthy")[0] == 200
    server.stop()
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.name for record in logged] == ["cuzk_agent.server"]
    assert "KeyError" in caplog.text


@pytest.mark.parametrize(("path", "name"), [("/-/healthy", "unhealthy"), ("/-/ready", "unready")])
def test_health(world: World, path: str, name: str) -> None:
    server = world.serve()
    status, headers, body = ask(server, path)
    assert (status, body) == (200, path.removeprefix("/-/").encode() + b"\n")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    getattr(world, name).extend(["prover-1: no such file", "prover-2: no such file"])
    assert ask(server, path)[0::2] == (503, b"prover-1: no such file\nprover-2: no such file\n")


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str | None] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_landing_page_shows_the_facts_as_text(world: World) -> None:
    evil = "<script>alert('x')</script>&\""
    world.facts = [("prover-1", evil), (evil, "b")]
    status, headers, body = ask(world.serve(), "/")
    page = _Tags(body.decode())
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-security-policy"].startswith("default-src 'none'; ")
    assert "script" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "script" not in page.tags
    assert page.texts.count(evil) == 2
    assert page.links == ["/metrics", "/-/healthy", "/-/ready"]


def test_the_landing_page_without_facts_is_whole() -> None:
    assert landing_page([]).rstrip().endswith("</html>")


@pytest.mark.parametrize("path", ["/metrics/", "/nothing", "/-/", "//metrics", "/metrics%00", "/%ff", "/..%2fmetrics"])
def test_what_is_not_there_is_a_404(world: World, path: str) -> None:
    status, headers, body = ask(world.serve(), path)
    assert (status, body) == (404, b"Not Found")
    assert headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/-/ready"])
def test_only_get_and_head(world: World, path: str, method: str) -> None:
    status, headers, _ = ask(world.serve(), path, method)
    assert status == 405
    assert sorted(headers["allow"].split(", ")) == ["GET", "HEAD"]
    assert headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/-/ready", "/nothing"])
def test_head_is_get_without_the_body(world: World, path: str) -> None:
    server = world.serve()
    status, headers, body = ask(server, path)
    head_status, head_headers, nothing = ask(server, path, "HEAD")
    assert (head_status, nothing) == (status, b"")
    assert head_headers["content-length"] == str(len(body))
    assert head_headers["content-type"] == headers["content-type"]


def test_a_connection_is_kept_for_the_next_request(world: World) -> None:
    client = http.client.HTTPConnection("127.0.0.1", world.serve().port, timeout=ANSWER_S)
    with contextlib.closing(client):
        ports = set()
        for _ in range(3):
            client.request("GET", "/metrics")
            assert client.getresponse().read() == BODY
            ports.add(client.sock.getsockname()[1])
    assert len(ports) == 1


# --- where it listens


def test_an_address_in_use(world: World) -> None:
    port = world.serve().port
    with pytest.raises(ListenError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: Address already in use$"):
        world.serve(port=port)
    world.servers.pop()


def test_a_host_that_does_not_exist(world: World) -> None:
    with pytest.raises(ListenError, match=r"^cannot listen on nowhere\.invalid:80: "):
        world.serve(host="nowhere.invalid", port=80)
    world.servers.pop()


def test_the_port_is_free_again_after_a_stop(world: World) -> None:
    first = world.serve()
    with connect(first):
        assert first.stop()
    second = world.serve(port=first.port)
    assert second.port == first.port
    assert ask(second, "/-/healthy")[0] == 200


def test_it_starts_once(world: World) -> None:
    with pytest.raises(RuntimeError, match="has been started before"):
        world.serve().start()


def test_a_server_that_was_never_started_stops() -> None:
    server = Server("127.0.0.1", 0, Views(metrics, list, list, list))
    assert server.stop()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize(("host", "clients"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
def test_ipv6(world: World, host: str, clients: list[str]) -> None:
    server = world.serve(host=host)
    assert server.address == f"[{host}]:{server.port}"
    for client in clients:
        with socket.create_connection((client, server.port), timeout=ANSWER_S) as connection:
            connection.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
            assert read_to_end(connection).endswith(b"\r\n\r\nhealthy\n")


def test_the_end_of_the_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    failures = []

    async def fail(*_: object, **__: object) -> None:
        raise OSError("no such luck")

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    monkeypatch.setattr("asyncio.start_server", fail)
    server = Server("127.0.0.1", 0, Views(metrics, list, list, list), on_failure=on_failure)
    server.start()
    assert failed.wait(ANSWER_S)
    assert [str(error) for error in failures] == ["no such luck"]
    assert server.stop()


# --- clients that are slow, silent, or many


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a line", "half a head", "no second request"],
)
def test_a_connection_without_a_request_is_closed(world: World, sent: bytes) -> None:
    with connect(world.serve(Limits(idle_s=0.1))) as client:
        client.sendall(sent)
        read_to_end(client)


def test_bytes_that_trickle_in_do_not_keep_a_connection_open(world: World) -> None:
    with connect(world.serve(Limits(idle_s=0.1))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        client.settimeout(0.01)
        closed = False
        while not closed:
            try:
                client.sendall(b"x")
                closed = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True


def test_a_body_that_never_comes_is_not_waited_for(world: World) -> None:
    with connect(world.serve()) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nhalf")
        assert read_to_end(client).startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    ],
    ids=["an endless head", "TLS", "no host"],
)
def test_what_is_not_a_request_is_refused(world: World, sent: bytes, status: bytes) -> None:
    with connect(world.serve()) as client:
        client.sendall(sent)
        assert read_to_end(client).startswith(b"HTTP/1.1 " + status)


WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBu"
)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + WEBSOCKET + b"\r\n\r\n",
    ],
    ids=["HTTP/2", "an upgrade to HTTP/2", "a websocket"],
)
def test_other_protocols_are_hung_up_on(world: World, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    server = world.serve(Limits(idle_s=ANSWER_S, request_s=ANSWER_S, stop_s=ANSWER_S))
    for _ in range(3):
        with connect(server) as client:
            client.sendall(sent)
            read_to_end(client)
    assert server.stop()
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_idle_connections_do_not_keep_a_scraper_out(world: World) -> None:
    server = world.serve(Limits(idle_s=ANSWER_S))
    with contextlib.ExitStack() as idle:
        for number in range(200):
            client = idle.enter_context(connect(server))
            client.sendall(b"GET /metrics HTTP/1.1\r\n"[: number % 20])
        assert ask(server, "/metrics")[0] == 200


def test_the_longest_idle_connection_makes_room(world: World) -> None:
    server = world.serve(Limits(connections=2, idle_s=ANSWER_S))

    def used(client: socket.socket) -> socket.socket:
        client.sendall(b"HEAD /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        return client

    with used(connect(server)) as first, used(connect(server)) as second:
        used(first)
        with used(connect(server)):
            assert read_to_end(second) == b""
            used(first)


def test_nobody_is_let_in_while_all_are_busy(world: World) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def slow(_: str | None) -> tuple[bytes, str]:
        started.release()
        assert go_on.wait(ANSWER_S)
        return BODY, "text/plain"

    world.metrics = slow
    server = world.serve(Limits(connections=2))
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(server) as one, connect(server) as other:
        for client in (one, other):
            client.sendall(request)
            assert started.acquire(timeout=ANSWER_S)
        with connect(server) as third:
            assert read_to_end(third) == b""
        go_on.set()
        assert read_to_end(one).endswith(BODY)
        assert read_to_end(other).endswith(BODY)


def test_slow_metrics_do_not_hold_up_health(world: World) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()
    running = []

    def slow(_: str | None) -> tuple[bytes, str]:
        running.append(1)
        started.release()
        assert go_on.wait(ANSWER_S)
        return BODY, "text/plain"

    world.metrics = slow
    server = world.serve(Limits(renders=2))
    with contextlib.ExitStack() as waiting:
        clients = [waiting.enter_context(connect(server)) for _ in range(50)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for _ in range(2):
            assert started.acquire(timeout=ANSWER_S)
        assert ask(server, "/-/healthy")[0] == 200
        assert len(running) == 2
        go_on.set()
        assert all(read_to_end(client).endswith(BODY) for client in clients)


def test_an_answer_that_is_not_read_is_given_up(world: World) -> None:
    world.metrics = lambda _: (b"x" * 50_000_000, "text/plain")
    server = world.serve(Limits(connections=1, request_s=0.2))
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1) == b"H"
        # The one connection there may be is free again as soon as the other is given up.
        answer = b""
        while not answer:
            with connect(server) as next_client, contextlib.suppress(ConnectionError):
                next_client.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
                answer = read_to_end(next_client)
        assert answer.endswith(b"healthy\n")
        assert len(read_to_end(client)) < 50_000_000


# --- how it stops


def test_stop_closes_idle_connections(world: World) -> None:
    server = world.serve(Limits(idle_s=10 * ANSWER_S))
    with connect(server) as silent, connect(server) as half, connect(server) as kept:
        half.sendall(b"GET /met")
        kept.sendall(b"HEAD /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert server.stop()
        assert [read_to_end(client) for client in (silent, half, kept)] == [b"", b"", b""]
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    assert server.stop()


def test_stop_lets_a_request_finish(world: World) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(_: str | None) -> tuple[bytes, str]:
        started.set()
        assert go_on.wait(ANSWER_S)
        return BODY, "text/plain"

    world.metrics = slow
    server = world.serve(Limits(stop_s=ANSWER_S))
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert started.wait(ANSWER_S)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        go_on.set()
        assert read_to_end(client).endswith(BODY)
        stopping.join(ANSWER_S)
        assert not stopping.is_alive()


def test_stop_does_not_wait_for_a_client_that_does_not_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.metrics = lambda _: (b"x" * 50_000_000, "text/plain")
    server = world.serve(Limits(stop_s=0.1))
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1) == b"H"
        assert server.stop()
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
