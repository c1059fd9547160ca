"""The dispatcher: whose turn it is, and who is proved together."""

from __future__ import annotations

from cuzk_agent.demo.lines import Line, Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import POREP, SNAP, WINDOW, Burst, Priority, Request, Scenario, Setting


def run(setting: Setting, *requests: Request) -> list[Line]:
    return list(Model(Scenario("", setting, (Burst(0, requests),)), 1, rounds=1).lines())


def fields(lines: list[Line], message: str) -> list[dict[str, str]]:
    return [dict(line.fields) for line in lines if isinstance(line, Tracing) and line.message == message]


def test_the_most_urgent_job_comes_first_then_the_oldest() -> None:
    lines = run(
        Setting(dispatchers=1),
        Request(0, WINDOW),
        Request(1_000, POREP, priority=Priority.LOW),
        Request(2_000, POREP),
        Request(3_000, SNAP, priority=Priority.CRITICAL),
        Request(4_000, POREP),
    )
    assert [line["queue_position"] for line in fields(lines, "job enqueued")] == ["0", "0", "0", "0", "2"]
    dequeued = [line["job_id"] for line in fields(lines, "job dequeued for proving")]
    assert [job_id.rpartition("-")[2] for job_id in dequeued[1:]] == ["2044", "2043", "2045", "2042"]


def test_a_batch_is_dispatched_when_it_is_full_or_its_time_is_up_or_another_kind_comes() -> None:
    setting = Setting(max_batch=3, batch_wait_ms=60_000, dispatchers=4)
    full = run(setting, *(Request(i * 1_000, POREP) for i in range(3)))
    assert [line["batch_size"] for line in fields(full, "processing batch")] == ["3"]
    late = run(setting, Request(0, POREP), Request(1_000, POREP), Request(70_000, POREP))
    assert [line["batch_size"] for line in fields(late, "processing batch")] == ["2"]
    assert len(fields(late, "assigned pipeline sequence number")) == 1
    other = run(setting, Request(0, POREP), Request(1_000, POREP), Request(2_000, SNAP), Request(2_500, POREP))
    assert [line["batch_size"] for line in fields(other, "processing batch")] == ["2"]
    assert len(fields(other, "sector proof delivered from batch")) == 2
