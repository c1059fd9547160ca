"""`cuzk-agent run` and `cuzk-agent demo` as processes: what they serve, what disturbs them, how they end."""

from __future__ import annotations

import gzip
import lzma
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from e2e.support import Agent, Page, Prover, in_background, wait_until

DATA = Path(__file__).parent.parent / "data"
MIB = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The path of a log, in a directory of its own."""
    directory = tmp_path / "var log"
    directory.mkdir()
    return directory / "cuzk.log"


def following(log: Path) -> Agent:
    return Agent("run", "--log", f"p={log}", "--from", "start")


def idle_s(page: Page) -> float:
    return page.sum("cuzk_gpu_idle_seconds_total", gpu="0")


def busy_s(page: Page) -> float:
    return page.sum("cuzk_gpu_logged_busy_seconds_total", gpu="0")


# --- figures


def test_a_capture_gives_the_published_figures(log: Path) -> None:
    log.write_bytes(lzma.decompress((DATA / "seeds/p9-c15.log.xz").read_bytes()))
    with following(log) as agent:
        agent.wait_ready()
        # The last quarter of a second is settled when it has passed.
        page = agent.wait_for(lambda page: page.sum("cuzk_gpu_open_gap_seconds") > 0, "the end")
        assert page.sum("cuzk_gpu_logged_busy_seconds_total") == pytest.approx(550.8, abs=1e-6)
        assert page.sum("cuzk_gpu_spans_total") == 150
        assert page.sum("cuzk_gpu_gap_seconds_count") == 149
        assert page.sum("cuzk_gpu_gap_seconds_sum") == pytest.approx(60.5, abs=1e-6)
        assert page.sum("cuzk_gpu_gap_seconds_bucket", le="0.8") == 149 - 6
        assert page.sum("cuzk_synth_seconds_sum") / page.sum("cuzk_synth_seconds_count") == pytest.approx(
            36.2, abs=0.05
        )
        assert page.sum("cuzk_partition_outcomes_total", outcome="proved") == 150
        assert agent.stop() == 0


def test_from_the_end_only_what_comes_is_counted(log: Path) -> None:
    log.write_bytes(lzma.decompress((DATA / "seeds/p9-c15.log.xz").read_bytes()))
    with Agent("run", "--log", str(log)) as agent, Prover(log) as prover:
        agent.wait_ready()
        prover.start_engine()
        prover.start_span("porep-1000-1", 0)
        prover.end_span("porep-1000-1", 0)
        agent.wait_for(lambda page: page.sum("cuzk_timeline_events_total") == prover.events, "its events")
        page = agent.wait_for(lambda page: page.sum("cuzk_gpu_spans_total"), "its span")
        assert page.sum("cuzk_gpu_spans_total") == 1
        assert busy_s(page) == pytest.approx(prover.all_busy_s, abs=1e-6)


# --- time goes on within a span and within a gap


def test_busy_and_idle_advance_during_a_span_and_a_gap(log: Path) -> None:
    with Prover(log) as prover, following(log) as agent:
        prover.start_engine()
        agent.wait_for(lambda page: page.has("cuzk_gpu_logged_busy_seconds_total", gpu="0"), "its GPU")

        def prove(number: int) -> Page:
            job = f"porep-1000-{number}"
            prover.start_span(job, 0)
            first = agent.wait_for(lambda page: page.sum("cuzk_partitions_in_flight", stage="gpu"), "an open span")
            within = agent.wait_for(lambda page: busy_s(page) > busy_s(first) + 0.2, "busy to advance")
            further = agent.wait_for(lambda page: busy_s(page) > busy_s(within), "busy to advance further")
            assert further.sum("cuzk_partition_outcomes_total", outcome="proved") == number
            assert idle_s(further) == idle_s(within)
            prover.end_span(job, 0)
            closed = agent.wait_for(lambda page: page.sum("cuzk_gpu_open_gap_seconds") > 0.2, "an open gap")
            after = agent.wait_for(lambda page: idle_s(page) > idle_s(closed), "idle to advance")
            assert busy_s(after) == busy_s(closed) == pytest.approx(prover.all_busy_s, abs=1e-6)
            assert after.by("cause", "cuzk_gpu_open_gap_seconds").keys() == {"no_work"}
            return after

        assert prove(0).sum("cuzk_gpu_gap_seconds_count") == 0
        after = prove(1)
        # Only what lies between two spans is a gap that is closed.
        assert after.sum("cuzk_gpu_gap_seconds_count") == 1
        elapsed_s = after.sum("cuzk_agent_settled_timestamp_seconds") - after.sum("cuzk_engine_start_timestamp_seconds")
        assert busy_s(after) + idle_s(after) == pytest.approx(elapsed_s, abs=0.002)


# --- how it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it(log: Path, number: signal.Signals) -> None:
    log.touch()
    with following(log) as agent:
        agent.wait_ready()
        # A client that keeps its connection open does not hold it up.
        with socket.create_connection(("127.0.0.1", agent.port)):
            assert agent.stop(number) == 0
        assert agent.out == []
        assert agent.log[-1].endswith(f"{number.name}: stopping\n")
        assert agent.complaints() == []


def test_a_port_that_is_taken(log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in (["run", "--log", str(log)], ["demo"]):
            ran = run(*command, "--listen", address)
            assert ran.returncode == 3
            assert ran.stderr.endswith(f"cannot listen on {address}: Address already in use\n")
            assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('from = "middle"', 'from = \'middle\': expected "end" or "start"'),
        ("[timeline]\nsilence_limit = 5", "timeline.silence_limit = 5: expected a duration"),
        ('lissen = "127.0.0.1:1"', "lissen is not a setting: expected listen"),
        ("[[source]]\nname = 'x'", "source[0].path is missing"),
        ("=", "is not TOML"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(text, encoding="utf-8")
    ran = run("run", "--config", str(file))
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"cuzk-agent: {file}: {told}")
    assert ran.stdout == ""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cuzk_agent", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=False)


# --- sources that come and go


def test_a_log_that_does_not_exist_yet(log: Path) -> None:
    with Agent("run", "--log", f"p={log}") as agent:
        agent.find(r"WARNING cuzk_agent\.app: source p: missing \(.*/cuzk\.log: No such file or directory\)\n")
        status, _, body = agent.get("/-/ready")
        assert (status, body.decode()) == (503, f"source p: missing ({log}: No such file or directory)\n")
        assert agent.get("/-/healthy")[0] == 200
        page = agent.page()
        assert page.sum("cuzk_agent_source_up") == 0
        assert page.by("state", "cuzk_agent_source_state") == {"missing": 1}
        # What is known to come is there at 0 already.
        assert page.sum("cuzk_timeline_events_total") == 0
        assert page.sum("cuzk_synth_seconds_count") == 0
        # Though it counts from the end of what it finds: what appears later is new, all of it.
        with Prover(log) as prover:
            prover.start_engine()
            prover.start_span("porep-1000-1", 0)
            agent.wait_ready()
            page = agent.wait_for(lambda page: page.sum("cuzk_timeline_events_total") == prover.events, "its events")
        assert page.sum("cuzk_agent_source_up") == 1
        agent.find("INFO cuzk_agent.app: source p: following\n")


def test_a_directory_in_the_place_of_a_log(log: Path) -> None:
    log.mkdir()
    with following(log) as agent:
        wait_until(lambda: b"unreadable" in agent.get("/-/ready")[2], "the reason")
        assert agent.page().by("state", "cuzk_agent_source_state") == {"unreadable": 1}
        log.rmdir()
        with Prover(log) as prover:
            prover.start_engine()
            agent.wait_ready()
        assert agent.stop() == 0


def test_rotation_by_renaming_loses_nothing(log: Path) -> None:
    rotations = 5
    with following(log) as agent, Prover(log) as prover:
        prover.start_engine()
        agent.wait_ready()

        def prove(enough: threading.Event) -> None:
            number = 0
            while not enough.is_set():
                prover.start_span("porep-1000-1", number)
                prover.end_span("porep-1000-1", number)
                number += 1
                enough.wait(0.002)

        def read_some() -> None:
            seen = agent.page().sum("cuzk_timeline_events_total")
            agent.wait_for(lambda page: page.sum("cuzk_timeline_events_total") > seen + 100, "events")

        for number in range(rotations):
            with in_background(prove):
                read_some()
                # The prover does not know of it, and writes on into the old file.
                log.rename(log.with_name(f"cuzk.log.{number}"))
                read_some()
            prover.reopen()
        with in_background(prove):
            agent.wait_for(lambda page: page.sum("cuzk_agent_rotations_total") == rotations, "the last file")
        page = agent.wait_for(lambda page: page.sum("cuzk_timeline_events_total") == prover.events, "all events")
        assert page.sum("cuzk_partition_outcomes_total", outcome="proved") == len(prover.spans_ms)
        agent.wait_for(lambda page: busy_s(page) == pytest.approx(prover.all_busy_s, abs=1e-6), "the busy time")
        assert page.sum("cuzk_agent_lost_bytes_total") == 0
        assert page.sum("cuzk_agent_truncations_total") == 0
        assert page.sum("cuzk_agent_unparsed_lines_total") == 0


@pytest.mark.parametrize("flags", [os.O_APPEND, 0])
def test_rotation_by_copying_loses_nothing_that_was_there(log: Path, flags: int) -> None:
    with Prover(log, flags) as prover, following(log) as agent:
        prover.start_engine()
        for number in range(3):
            prover.start_span("porep-1000-1", number)
            prover.end_span("porep-1000-1", number)
            agent.wait_for(lambda page: page.sum("cuzk_timeline_events_total") == prover.events, "its events")
            # A writer that did not open its log for appending goes on where it was, behind a hole of NULs.
            os.truncate(log, 0)
            agent.wait_for(lambda page: page.sum("cuzk_agent_truncations_total") == number + 1, "the truncation")  # noqa: B023
        page = agent.wait_for(lambda page: page.sum("cuzk_gpu_spans_total") == 3, "all spans")
        assert page.sum("cuzk_agent_lost_bytes_total") == 0
        assert page.sum("cuzk_agent_unparsed_lines_total") == 0
        assert (page.sum("cuzk_agent_nul_bytes_total") > 0) == (flags == 0)
        assert agent.complaints() == []


# --- provers that end


def test_a_killed_prover_and_its_successor(log: Path) -> None:
    with following(log) as agent:
        with Prover(log) as killed:
            killed.start_engine()
            killed.start_span("porep-1000-1", 0)
            agent.wait_for(lambda page: page.has("cuzk_gpu_spans_total") and busy_s(page) > 0.3, "a busy GPU")
        with Prover(log) as successor:
            successor.start_engine()
            page = agent.wait_for(lambda page: page.sum("cuzk_engine_restarts_total"), "the successor")
            assert page.sum("cuzk_partition_outcomes_total", outcome="abandoned") == 1
            assert page.sum("cuzk_partitions_in_flight") == 0
            before_s = busy_s(page)
            successor.start_span("porep-1000-1", 0)
            successor.end_span("porep-1000-1", 0)
            page = agent.wait_for(lambda page: page.sum("cuzk_gpu_spans_total") == 2, "its span")
            assert busy_s(page) == pytest.approx(before_s + successor.all_busy_s, abs=1e-6)
            assert page.by("outcome", "cuzk_partition_outcomes_total") == {"abandoned": 1, "proved": 1}
            successor.tell("received SIGINT, shutting down")
            page = agent.wait_for(lambda page: not page.sum("cuzk_engine_running"), "its end")
            # Nothing is known of the GPU now, and nothing is said.
            assert not page.has("cuzk_gpu_open_gap_seconds")
            first = agent.page()
            second = agent.wait_for(lambda page: page.text != first.text, "another page")
            assert (busy_s(first), idle_s(first)) == (busy_s(second), idle_s(second))


# --- what it serves


def test_gzip_and_openmetrics_are_negotiated(log: Path) -> None:
    log.write_bytes(lzma.decompress((DATA / "seeds/p9-c15.log.xz").read_bytes()))
    with following(log) as agent:
        agent.wait_ready()
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        _, headers, body = agent.get("/metrics", {"Accept": accept, "Accept-Encoding": "gzip"})
        assert headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert headers["content-encoding"] == "gzip"
        families = text_string_to_metric_families(gzip.decompress(body).decode())  # type: ignore[no-untyped-call]
        exemplars = [s.exemplar for family in families for s in family.samples if s.exemplar]
        assert "dddfc7b6" in {exemplar.labels["job_id"][:8] for exemplar in exemplars}

        _, headers, body = agent.get("/metrics")
        assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "content-encoding" not in headers
        checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


# --- what no log should hold


def test_memory_stays_flat_whatever_is_in_the_log(log: Path) -> None:
    with Prover(log) as prover, following(log) as agent:
        prover.start_engine()

        def prove(number: int) -> Page:
            prover.start_span("porep-1000-1", number)
            prover.end_span("porep-1000-1", number)
            return agent.wait_for(lambda page: page.sum("cuzk_gpu_spans_total") == number + 1, f"span {number}")

        prove(0)
        before = agent.memory_bytes()

        piece = b"0123456789abcdef" * (MIB // 16)
        for _ in range(100):
            prover.write(piece)
        prover.write(b"\n")
        page = prove(1)
        assert page.sum("cuzk_agent_overlong_lines_total") == 1

        prover.write(bytes(10 * MIB) + b"\n")
        page = prove(2)
        assert page.sum("cuzk_agent_nul_bytes_total") == 10 * MIB

        prover.write(b"\xff\xfe\xc3(" * 1000 + b"\n" + b"TIMELINE,\xff,GPU_START,\xff,worker=0\n")
        prove(3)
        prover.write(f"TIMELINE,{prover.now_ms():.0f},SYNTH_START,porep-1000-2,partition=0\r\n".encode())
        prove(4)
        # An event of the year 5138, and numbers that no clock shows.
        for offset in ("99999999999999", "9" * 400, "-1", "1e9"):
            prover.write(f"TIMELINE,{offset},GPU_START,porep-1000-3,worker=0,partition=0\n".encode())
            prove(len(prover.spans_ms))
        for number in range(20_000):
            prover.write(f"TIMELINE,nonsense {number}\n".encode())
        page = prove(len(prover.spans_ms))

        assert page.sum("cuzk_partition_outcomes_total", outcome="proved") == len(prover.spans_ms)
        page = agent.wait_for(lambda page: busy_s(page) == pytest.approx(prover.all_busy_s, abs=1e-6), "the busy time")
        assert page.sum("cuzk_partitions_in_flight", stage="synth") == 1
        assert agent.memory_bytes("VmHWM") - before < 24 * MIB
        assert agent.stop() == 0


# --- the demo


def test_the_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with Agent("demo", "--speed", "100", environ={"TMPDIR": str(tmp_path)}) as agent:
        agent.wait_ready()
        agent.wait_for(lambda page: page.has("cuzk_gpu_spans_total") and page.sum("cuzk_gpu_spans_total"), "spans")
        status, _, body = agent.get("/")
        assert status == 200
        assert b"demo" in body
        (log,) = tmp_path.glob("*/cuzk.log")
        assert str(log) in "".join(agent.out)
        assert f"http://127.0.0.1:{agent.port}/metrics" in "".join(agent.out)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text(encoding="ascii")
        assert agent.stop(signal.SIGINT) == 0
        assert agent.complaints() == []
    assert list(tmp_path.iterdir()) == []
    assert children == ""
    assert not Path(f"/proc/{agent.pid}").exists()
