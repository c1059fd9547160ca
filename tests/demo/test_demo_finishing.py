"""The end of a proof: what the daemon knows of a bad one."""

from __future__ import annotations

import ast

from cuzk_agent.demo.lines import Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import POREP, SNAP, Burst, Fault, Request, Scenario, Setting
from cuzk_agent.demo.truth import Outcome

BAD = Request(0, POREP, Fault.SELF_CHECK)


def run(setting: Setting, *requests: Request) -> tuple[Model, list[Tracing]]:
    model = Model(Scenario("", setting, (Burst(0, requests),)), 1, rounds=1)
    return model, [line for line in model.lines() if isinstance(line, Tracing)]


def test_of_a_bad_proof_the_bad_partition_is_known() -> None:
    _, lines = run(Setting(), BAD)
    (results,) = [dict(line.fields) for line in lines if "per-partition verification" in line.message]
    valid, invalid = (ast.literal_eval(results[key]) for key in ("valid_partitions", "invalid_partitions"))
    assert len(invalid) == 1
    assert sorted(valid + invalid) == list(range(10))


def test_in_a_batch_only_the_bad_one_fails_and_no_partition_is_to_blame() -> None:
    model, lines = run(Setting(max_batch=2, batch_wait_ms=60_000), Request(0, POREP), BAD)
    assert model.truth().jobs == {("porep-c2", Outcome.PROVED): 1, ("porep-c2", Outcome.FAILED): 1}
    checked = [line for line in lines if line.message.startswith("Batched PoRep proof self-check")]
    assert sorted(dict(line.fields)["sector_idx"] for line in checked) == ["0", "1"]
    assert not any("per-partition verification" in line.message for line in lines)


def test_only_porep_proofs_are_checked() -> None:
    model, lines = run(Setting(), Request(0, SNAP, Fault.SELF_CHECK))
    assert model.truth().jobs == {("snap-update", Outcome.PROVED): 1}
    assert not any("self-check" in line.message for line in lines)
