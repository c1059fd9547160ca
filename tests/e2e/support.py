"""Runs the agent as its users do, asks it as its clients do, and writes the log that it follows."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

WAIT_S = 30.0
"""How long anything that must come is waited for; it comes within a fraction of that."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns once `condition` holds, and fails if it never does."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.02)


class Page:
    """What one scrape showed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all series of a metric that have these labels; fails if there are none."""
        found = [v for (n, have), v in self._samples.items() if n == name and labels.items() <= have]
        assert found, f"nothing is called {name}{labels}"
        return sum(found)

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is any series of a metric with these labels."""
        return any(n == name and labels.items() <= have for n, have in self._samples)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The values of a metric that are not 0, by one of its labels."""
        found: dict[str, float] = {}
        for (n, have), value in self._samples.items():
            if n == name and labels.items() <= have and value:
                key = dict(have)[label]
                found[key] = found.get(key, 0.0) + value
        return found

    def counters(self, **labels: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All series with these labels that may never fall."""
        return {
            (name, have): value
            for (name, have), value in self._samples.items()
            if name.endswith(("_total", "_count", "_sum", "_bucket")) and labels.items() <= have
        }


class Process:
    """A program that logs to stderr, ended by its process id when the context is left."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("CUZK_AGENT_")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env={**bare, **(environ or {})},
        )
        self.out: list[str] = []
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=_collect, args=(stream, lines))
            for stream, lines in ((self._process.stdout, self.out), (self._process.stderr, self.log))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def find(self, pattern: str) -> re.Match[str]:
        """The first place in its log that matches, waited for."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, "".join(list(self.log)))
            found.extend([match] if match else [])
            assert match or not self.ended, f"it ended before it said {pattern!r}:\n{''.join(self.log)}"
            return bool(found)

        wait_until(look, f"{pattern!r} in its log")
        return found[0]

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit status, once it has ended by itself, and all that it said is in `out` and `log`."""
        status = self._process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        return status

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to stop; returns its exit status."""
        self.send(number)
        return self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._process.kill()
        self.end()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


class Agent(Process):
    """`cuzk-agent` with these arguments, listening on a free port."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        command = (sys.executable, "-m", "cuzk_agent", *arguments, "--listen", "127.0.0.1:0")
        super().__init__(command, {"CUZK_AGENT_STATE": "off", **(environ or {})})
        self._port: int | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        if self._port is None:
            self._port = int(self.find(r"listening on http://127\.0\.0\.1:(\d+)/")[1])
        return self._port

    def __enter__(self) -> Self:
        return self

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(client):
            client.request("GET", path, headers=dict(headers or {}))
            answer = client.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def ready(self) -> bool:
        """Whether it says so."""
        return self.get("/-/ready")[0] == 200

    def wait_ready(self) -> None:
        """Waits until it says so."""
        wait_until(self.ready, "readiness")

    def page(self) -> Page:
        """What a scrape shows now."""
        status, _, body = self.get("/metrics")
        assert status == 200, body
        return Page(body.decode())

    def wait_for(self, condition: Callable[[Page], object], what: str) -> Page:
        """The first page on which `condition` holds."""
        pages: list[Page] = []

        def look() -> bool:
            status, _, body = self.get("/metrics")
            if status == 503:
                # It has only just started, or is still reading a backlog.
                return False
            assert status == 200, body
            pages[:] = [Page(body.decode())]
            return bool(condition(pages[0]))

        wait_until(look, what)
        return pages[0]

    def complaints(self) -> list[str]:
        """What it has logged beside the usual; that there is no NVIDIA driver is usual where tests run."""
        return [line for line in self.log if " INFO " not in line and "NVML can't be used" not in line]

    def memory_bytes(self, what: str = "VmRSS") -> int:
        """Its resident memory; with `VmHWM` the most it ever was."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        found = re.search(rf"^{what}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found
        return int(found[1]) * 1024


class Prover:
    """Writes a prover's log into a file as it happens: real offsets, each fragment a write of its own."""

    def __init__(self, path: Path, flags: int = os.O_APPEND) -> None:
        """`flags` as for open(2), on top of the obvious ones."""
        self._path = path
        self._flags = flags
        self._start_s, self._start_unix_ms = time.monotonic(), time.time() * 1000
        self._fd = self._open()
        self.events = 0
        """TIMELINE lines written."""
        self.spans_ms: list[tuple[int, int]] = []
        """Closed spans, by their offsets."""
        self._started_ms = 0

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | self._flags, 0o644)

    @property
    def start_unix_s(self) -> float:
        """When its engine started."""
        return self._start_unix_ms / 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def reopen(self) -> None:
        """Goes on in a new file at the same path, as after a rotation."""
        os.close(self._fd)
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Writes anything."""
        while data:
            data = data[os.write(self._fd, data) :]

    def now_ms(self) -> float:
        return (time.monotonic() - self._start_s) * 1000

    def tell(self, message: str, **fields: str) -> None:
        """Writes a tracing line."""
        time_utc = datetime.fromtimestamp(self.start_unix_s + self.now_ms() / 1000, UTC)
        shown = "".join(f" \x1b[3m{key}\x1b[0m\x1b[2m=\x1b[0m{value}" for key, value in fields.items())
        stamp, level, target = f"{time_utc:%Y-%m-%dT%H:%M:%S.%fZ}", "\x1b[32m INFO\x1b[0m", "cuzk_core::engine"
        self.write(f"\x1b[2m{stamp}\x1b[0m {level} \x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m {message}{shown}\n".encode())

    def start_engine(self) -> None:
        """Writes the lines of an engine with one worker on GPU 0."""
        self.tell("starting cuzk engine", pipeline_enabled="true")
        self.tell("pipeline GPU worker started", worker_id="0", gpu="0", sub_id="0")

    def event(self, name: str, job_id: str, detail: str) -> int:
        """Writes a TIMELINE line; returns its offset."""
        offset_ms = int(self.now_ms())
        for fragment in ("TIMELINE,", str(offset_ms), ",", name, ",", job_id, ",", detail, "\n"):
            self.write(fragment.encode())
        self.events += 1
        return offset_ms

    def start_span(self, job_id: str, partition: int) -> None:
        """A unit goes all the way to the GPU at once."""
        unit = f"partition={partition}"
        self.event("SYNTH_START", job_id, unit)
        self.event("SYNTH_END", job_id, f"{unit},synth_ms=0")
        self.event("GPU_QUEUE", job_id, unit)
        self.event("GPU_PICKUP", job_id, f"worker=0,{unit}")
        self._started_ms = self.event("GPU_START", job_id, f"worker=0,{unit}")

    def end_span(self, job_id: str, partition: int) -> None:
        """That unit is proved."""
        gpu_ms = int(self.now_ms()) - self._started_ms
        end_ms = self.event("GPU_END", job_id, f"worker=0,partition={partition},gpu_ms={gpu_ms}")
        self.spans_ms.append((self._started_ms, end_ms))

    @property
    def all_busy_s(self) -> float:
        """How long all its closed spans were open; they do not overlap."""
        return sum(end - start for start, end in self.spans_ms) / 1000

    def busy_s(self, from_unix_s: float, to_unix_s: float) -> float:
        """How long its spans were open between two moments."""
        from_ms, to_ms = ((at_s - self.start_unix_s) * 1000 for at_s in (from_unix_s, to_unix_s))
        return sum(max(0.0, min(end, to_ms) - max(start, from_ms)) for start, end in self.spans_ms) / 1000


@contextlib.contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[threading.Thread]:
    """Does `work` in a thread, which is told to end when the context is left, and must have ended well."""
    enough = threading.Event()
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work(enough)
        except BaseException as error:  # noqa: BLE001  raised again below
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield thread
    finally:
        enough.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert failures == []


def _collect(stream: Iterator[str] | None, lines: list[str]) -> None:
    assert stream is not None
    for line in stream:
        lines.append(line)  # noqa: PERF402  others look at them as they come
