"""Each fault: what the daemon says of it, and that its job comes to nothing."""

from __future__ import annotations

import pytest

from cuzk_agent.demo.lines import Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import FAILING, POREP, WINDOW, Burst, Fault, Kind, Request, Scenario, Setting
from cuzk_agent.demo.truth import Outcome


@pytest.mark.parametrize(
    ("kind", "fault", "message"),
    [
        (POREP, Fault.SYNTHESIS, "partition synthesis failed"),
        (POREP, Fault.SYNTHESIS_PANIC, "partition synthesis task panicked"),
        (POREP, Fault.PROVE_START, "GPU prove start failed"),
        (POREP, Fault.PROVE_START_PANIC, "GPU prove start task panicked"),
        (POREP, Fault.PROVING, "partition GPU proving failed"),
        (POREP, Fault.PROVING_PANIC, "partition GPU proving task panicked"),
        (POREP, Fault.SELF_CHECK, "Phase 7: PoRep proof self-check FAILED — proof will NOT be returned to caller"),
        (POREP, Fault.SELF_CHECK_ERROR, "Phase 7: PoRep proof self-check error — proof will NOT be returned to caller"),
        (WINDOW, Fault.SYNTHESIS, "synthesis failed"),
        (WINDOW, Fault.SYNTHESIS_PANIC, "synthesis task panicked"),
        (WINDOW, Fault.PROVE_START, "GPU prove start failed"),
        (WINDOW, Fault.PROVING, "GPU proving failed"),
        (WINDOW, Fault.PROVING_PANIC, "GPU proving task panicked"),
    ],
)
def test_a_fault_is_told_and_the_job_fails(kind: Kind, fault: Fault, message: str) -> None:
    model = Model(Scenario("", Setting(), (Burst(0, (Request(0, kind, fault),)),)), 1, rounds=1)
    errors = [line for line in model.lines() if isinstance(line, Tracing) and line.level == "ERROR"]
    assert errors[0].message == message
    assert ("panicked" in dict(errors[0].fields).get("error", "")) == ("panicked" in message)
    truth = model.truth()
    assert truth.jobs == {(kind.name, Outcome.FAILED): 1}
    assert truth.open_jobs == 0


def test_faults_end_as_they_should() -> None:
    model = Model(FAILING, 3, rounds=1)
    lines = list(model.lines())
    faults = [request.fault for burst in FAILING.bursts for request in burst.requests]
    assert {fault for fault in faults if fault is not None} == set(Fault)
    truth = model.truth()
    failed = sum(count for (_, outcome), count in truth.jobs.items() if outcome is Outcome.FAILED)
    assert failed == len(faults) - faults.count(None)
    assert truth.open_jobs == 0
    assert sum(gpu.wasted_ms for gpu in truth.gpus.values()) > 0
    # What was proved twice was asked for twice.
    enqueued = [
        dict(line.fields)["job_id"] for line in lines if isinstance(line, Tracing) and "enqueued" in line.message
    ]
    assert len(enqueued) - len(set(enqueued)) == 2
