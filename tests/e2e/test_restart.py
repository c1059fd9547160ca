"""`cuzk-agent run`, killed and started again while a prover writes and two Prometheis scrape."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuzk_agent.snapshot import decode
from cuzk_agent.timeline import saved
from cuzk_agent.timeline.pipeline import Pipeline
from e2e.support import Agent, Page, Prover, in_background, wait_until
from timeline.test_properties import counters

KILLS = 8


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The path of a log, in a directory of its own."""
    directory = tmp_path / "var log"
    directory.mkdir()
    return directory / "cuzk.log"


def going_on(log: Path) -> Agent:
    return Agent("run", "--log", f"p={log}", "--from", "start", "--state", str(log.parent / "agent.state"))


class Scraper:
    """A Prometheus: what it has seen must never fall, nor grow by more than can have happened since."""

    def __init__(self) -> None:
        self.scrapes = 0
        self._seen: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._settled_s = 0.0

    def look(self, agent: Agent) -> None:
        """Scrapes, if it is answered."""
        try:
            status, _, body = agent.get("/metrics")
        except OSError:
            return
        if status != 200:
            assert status == 503
            return
        page = Page(body.decode())
        now = page.counters(source="p")
        fell = {key: (value, now.get(key)) for key, value in self._seen.items() if not now.get(key, -1.0) >= value}
        assert not fell
        if page.has("cuzk_agent_settled_timestamp_seconds"):
            settled_s = page.sum("cuzk_agent_settled_timestamp_seconds")
            # A GPU's time is that of the clock.
            jumped = {
                key: (self._seen[key], value)
                for key, value in now.items()
                if key in self._seen
                and key[0] in GPU_SECONDS
                and value - self._seen[key] > settled_s - self._settled_s + 0.01
            }
            assert not jumped
            self._settled_s = settled_s
        self._seen = now
        self.scrapes += 1


GPU_SECONDS = ("cuzk_gpu_logged_busy_seconds_total", "cuzk_gpu_idle_seconds_total")


def prove(prover: Prover, enough: threading.Event) -> None:
    """Proves one partition after another."""
    chance, number = random.Random(5), 0
    while not enough.is_set():
        job = f"porep-1000-{number}"
        prover.tell("job enqueued", job_id=job, proof_kind="porep-c2", priority="Normal", queue_position="0")
        for partition in range(10):
            prover.start_span(job, partition)
            enough.wait(chance.choice((0, 0.004, 0.03)))
            if chance.random() < 0.2:
                prover.write(b"some library says something\n")
            prover.end_span(job, partition)
            enough.wait(chance.choice((0, 0.003)))
        prover.tell("Phase 7: all partitions complete, proof assembled", job_id=job, proof_len="1920", total_ms="900")
        prover.tell("Phase 7: single proof self-check PASSED", job_id=job)
        number += 1


@contextlib.contextmanager
def scraping(agents: list[Agent], scrapers: list[Scraper]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scraper in scrapers:

            def work(enough: threading.Event, scraper: Scraper = scraper) -> None:
                while not enough.wait(0.05):
                    if agents:
                        scraper.look(agents[-1])

            stack.enter_context(in_background(work))
        yield


def state_left(log: Path) -> dict[str, float]:
    """The counters in the state that an agent left."""
    memory = decode((log.parent / "agent.state").read_bytes())
    assert memory.at_end
    (source,) = memory.sources.values()
    pipeline = Pipeline()
    saved.load(pipeline, source.pipeline)
    return counters(pipeline.state())


def assert_as_if_read_at_once(log: Path, *parts: Path) -> None:
    whole = Pipeline()
    for part in (*parts, log):
        whole.feed(part.read_bytes().splitlines())
    whole.finish()
    expected, left = counters(whole.state()), state_left(log)
    # A machine under load may keep the prover from writing what it has dated: that is moved, and counted.
    settled = ("gpu ", "late_events") if left["late_events"] else ()
    wrong = {
        name: (value, left.get(name))
        for name, value in expected.items()
        if not name.startswith(settled) and left.get(name, 0.0) != pytest.approx(value, abs=1e-9)
    }
    assert not wrong


def test_killed_at_any_moment(log: Path) -> None:
    chance = random.Random(6)
    agents: list[Agent] = []
    scrapers = [Scraper(), Scraper()]
    with Prover(log) as prover:
        prover.start_engine()
        with in_background(lambda enough: prove(prover, enough)), scraping(agents, scrapers):
            for kill in range(KILLS):
                with going_on(log) as agent:
                    if kill % 2 == 0:
                        agent.wait_ready()
                        agents.append(agent)
                    else:
                        # While it starts, or catches up.
                        agent.find("listening on")
                        agents.append(agent)
                    time.sleep(chance.choice((0, 0.1, 0.3, 0.7)))
                    agent.stop(signal.SIGKILL)
            agent = going_on(log).__enter__()
            agents.append(agent)
            agent.wait_ready()
            counts = [scraper.scrapes for scraper in scrapers]
            wait_until(lambda: all(s.scrapes > n for s, n in zip(scrapers, counts, strict=True)), "scrapes")
        prover.tell("shutting down cuzk engine")
        page = agent.wait_for(lambda page: not page.sum("cuzk_engine_running"), "the end")
        assert page.sum("cuzk_timeline_events_total") == prover.events
        assert page.sum("cuzk_agent_lines_total") == log.read_bytes().count(b"\n")
        assert page.sum("cuzk_agent_state_write_errors_total") == 0
        assert agent.stop() == 0
        agent.__exit__()
        assert agent.complaints() == []
    assert_as_if_read_at_once(log)


def test_rotated_while_it_is_down(log: Path) -> None:
    rotated = log.with_name("cuzk.log.1")
    with Prover(log) as prover:
        prover.start_engine()
        prover.start_span("porep-1000-1", 0)
        with going_on(log) as agent:
            agent.wait_for(lambda page: page.has("cuzk_gpu_spans_total", gpu="0"), "its GPU")
            agent.wait_for(lambda page: page.sum("cuzk_gpu_logged_busy_seconds_total") > 0.2, "a busy GPU")
            before = agent.page()
            agent.stop(signal.SIGKILL)
        prover.end_span("porep-1000-1", 0)
        log.rename(rotated)
        prover.start_span("porep-1000-1", 1)
        prover.reopen()
        prover.end_span("porep-1000-1", 1)
        with going_on(log) as agent:
            agent.wait_ready()
            prover.tell("shutting down cuzk engine")
            page = agent.wait_for(lambda page: not page.sum("cuzk_engine_running"), "the end")
            assert page.sum("cuzk_timeline_events_total") == prover.events
            assert page.sum("cuzk_agent_rotations_total") == 1
            assert page.sum("cuzk_agent_lost_bytes_total") == 0
            after = page.counters(source="p")
            assert {key: value for key, value in before.counters(source="p").items() if value > after[key]} == {}
            assert agent.stop() == 0
            assert agent.complaints() == []
    assert_as_if_read_at_once(log, rotated)


def test_a_state_that_can_not_be_written_is_told(log: Path) -> None:
    state = log.parent / "agent.state"
    state.mkdir()
    log.touch()
    with going_on(log) as agent:
        wait_until(lambda: b"the state can't be written: Is a directory\n" in agent.get("/-/ready")[2], "the reason")
        assert agent.get("/-/healthy")[0] == 200
        # What it knows is shown all the same.
        page = agent.page()
        assert page.sum("cuzk_agent_source_up") == 1
        assert page.sum("cuzk_agent_state_write_errors_total") >= 1
        state.rmdir()
        agent.wait_for(lambda page: page.has("cuzk_agent_state_size_bytes"), "a state")
        agent.wait_ready()
