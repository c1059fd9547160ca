"""What each message of the daemon's tracing output means for its engine.

The messages are those of the daemon's sources (curio, `extern/cuzk`); a handler takes the engine, the line and the
offset at which it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from cuzk_agent.timeline.engine import Engine
from cuzk_agent.timeline.lines import TracingLine
from cuzk_agent.timeline.torn import MAX_JOB_ID

SETTINGS = ("num_gpus", "gpu_workers_per_device", "total_workers", "pipeline_enabled", "rayon_threads")
"""What is kept of the start-up lines."""
_MAX_SETTING = 64
_MAX_GPUS = 64
_MAX_MESSAGE = 256
"""Of a message, what tells its meaning: more is not remembered."""


def take(engine: Engine, line: TracingLine, at_ms: int) -> None:
    """Tells the engine what a tracing line says."""
    span, message = line.span, line.message
    if len(line.fields.get("job_id", "")) > MAX_JOB_ID or len(span.get("job_id", "")) > MAX_JOB_ID:
        # No TIMELINE line could name that job.
        return
    if span:
        _learn_worker(engine, span, at_ms)
        if "job_id" in span and "proof_kind" in span:
            engine.units.learn_kind(span["job_id"], span["proof_kind"])
    if trouble := _TROUBLE.get(message):
        engine.trouble(trouble)
    if handle := _handler_of(message[:_MAX_MESSAGE]):
        handle(engine, line, at_ms)


@lru_cache(maxsize=1024)
def _handler_of(message: str) -> Callable[[Engine, TracingLine, int], None] | None:
    if handle := _HANDLERS.get(message):
        return handle
    if "self-check " in message:
        return _self_checked
    if "per-partition verification results" in message:
        return _bad_partitions
    if message.startswith("acquire request exceeds total budget"):
        return _over_budget
    return _srs_evicted if message.startswith("SRS evicted") else None


def settings_in(fields: Mapping[str, str]) -> dict[str, str]:
    """The settings among a line's fields."""
    return {key: fields[key] for key in SETTINGS if len(fields.get(key, " " * _MAX_SETTING)) < _MAX_SETTING}


def _number(fields: Mapping[str, str], key: str) -> int | None:
    value = fields.get(key, "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 12 else None


def _gpu(fields: Mapping[str, str]) -> str | None:
    gpu = _number(fields, "gpu")
    return str(gpu) if gpu is not None and gpu < _MAX_GPUS else None


def _learn_worker(engine: Engine, fields: Mapping[str, str], at_ms: int) -> None:
    worker, gpu = _number(fields, "worker_id"), _gpu(fields)
    if worker is not None and gpu is not None:
        engine.know_worker(worker, gpu, at_ms)


def _gpu_workers(engine: Engine, line: TracingLine, at_ms: int) -> None:
    engine.settings.update(settings_in(line.fields))
    per_device = min(_number(line.fields, "gpu_workers_per_device") or 1, 64)
    for index, ordinal in enumerate(re.findall(r"[0-9]+", line.fields.get("gpus", ""))[:_MAX_GPUS]):
        for worker in range(index * per_device, (index + 1) * per_device):
            _learn_worker(engine, {"worker_id": str(worker), "gpu": ordinal}, at_ms)


def _worker_started(engine: Engine, line: TracingLine, at_ms: int) -> None:
    _learn_worker(engine, line.fields, at_ms)


def _enqueued(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.fields.get("job_id"):
        engine.ledger.learn(at_ms, jobs_announced=True)
        engine.units.enqueued(job_id, line.fields.get("proof_kind"), at_ms)


def _dispatched(engine: Engine, line: TracingLine, at_ms: int) -> None:
    job_id, count = line.fields.get("job_id"), _number(line.fields, "num_partitions")
    if job_id and count:
        engine.units.dispatched(job_id, count, at_ms)


def _prove_start_returned(engine: Engine, line: TracingLine, at_ms: int) -> None:
    wall_ms = _number(line.fields, "spawn_blocking_wall_ms")
    if wall_ms is None:
        return
    held = engine.kernel.prove_start_returned(_gpu(line.span), wall_ms)
    if held is not None and (job_id := line.span.get("job_id")):
        engine.units.kernels_ran(job_id, _number(line.span, "partition"), at_ms - held.mutex_held_ms, at_ms)


def _prove_complete(engine: Engine, line: TracingLine, at_ms: int) -> None:
    job_id = line.fields.get("job_id")
    if job_id and not engine.units.prove_complete(job_id, _number(line.fields, "partition"), at_ms):
        engine.ledger.learn(at_ms, spans_logged=False)


def _assembled(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.fields.get("job_id"):
        engine.units.assembled(job_id, _number(line.fields, "total_ms"), at_ms)


def _whole_completed(engine: Engine, line: TracingLine, at_ms: int) -> None:
    fields = line.fields
    engine.units.whole_proof_completed(_number(fields, "total_ms"), _number(fields, "gpu_ms"), at_ms)


def _self_checked(engine: Engine, line: TracingLine, at_ms: int) -> None:
    passed = "self-check PASSED" in line.message
    if not passed and not re.search("self-check (FAILED|error)", line.message):
        return
    if not passed:
        engine.trouble("selfcheck")
    if job_id := line.fields.get("job_id"):
        engine.units.self_checked(job_id, passed, at_ms)


def _over_budget(engine: Engine, line: TracingLine, at_ms: int) -> None:
    engine.trouble("memory_budget")


def _srs_loading(engine: Engine, line: TracingLine, at_ms: int) -> None:
    engine.srs_loading(line.fields.get("circuit_id", "")[:_MAX_SETTING], at_ms)


def _srs_loaded(engine: Engine, line: TracingLine, at_ms: int) -> None:
    engine.srs_loaded(line.fields.get("circuit_id", "")[:_MAX_SETTING], _number(line.fields, "elapsed_ms"))


def _srs_evicted(engine: Engine, line: TracingLine, at_ms: int) -> None:
    engine.trouble("srs_evicted")


def _bad_partitions(engine: Engine, line: TracingLine, at_ms: int) -> None:
    job_id = line.fields.get("job_id", "")
    for partition in re.findall(r"[0-9]{1,4}", line.fields.get("invalid_partitions", ""))[:64]:
        engine.trouble("bad_partition", engine.units.gpu_of(job_id, int(partition)) or "")


def _unit_failed(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.fields.get("job_id"):
        engine.units.unit_failed(job_id, _number(line.fields, "partition"), at_ms)


def _prove_start_failed(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.span.get("job_id"):
        # The daemon does not tell the assembler: the siblings are proved for nothing.
        engine.units.unit_failed(job_id, _number(line.span, "partition"), at_ms, siblings_go_on=True)


def _dropped(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.fields.get("job_id"):
        engine.units.unit_dropped(job_id, _number(line.fields, "partition"), at_ms)


def _discarded(engine: Engine, line: TracingLine, at_ms: int) -> None:
    if job_id := line.fields.get("job_id"):
        engine.units.result_discarded(job_id, _number(line.fields, "partition"), at_ms)


_HANDLERS: Mapping[str, Callable[[Engine, TracingLine, int], None]] = {
    "initializing GPU workers": _gpu_workers,
    "pipeline GPU worker started": _worker_started,
    "job enqueued": _enqueued,
    "loading SRS from disk": _srs_loading,
    "SRS loaded successfully": _srs_loaded,
    "dispatching per-partition synthesis (budget-gated)": _dispatched,
    "dispatching per-partition SnapDeals synthesis (budget-gated)": _dispatched,
    "GPU_TIMING prove_start returned": _prove_start_returned,
    "partition GPU prove complete": _prove_complete,
    "Phase 7: all partitions complete, proof assembled": _assembled,
    "proof completed successfully (pipeline)": _whole_completed,
    "sector proof delivered from batch": _assembled,
    "partition synthesis failed": _unit_failed,
    "partition synthesis task panicked": _unit_failed,
    "partition GPU proving failed": _unit_failed,
    "partition GPU proving task panicked": _unit_failed,
    "GPU prove start failed": _prove_start_failed,
    "GPU prove start task panicked": _prove_start_failed,
    "skipping synthesis for failed job": _dropped,
    "skipping GPU prove for failed partitioned job": _dropped,
    "discarding GPU result for failed job": _discarded,
}

_TROUBLE: Mapping[str, str] = {
    "partition synthesis failed": "synthesis_failed",
    "partition synthesis task panicked": "synthesis_failed",
    "synthesis failed": "synthesis_failed",
    "synthesis task panicked": "synthesis_failed",
    "partition GPU proving failed": "prove_failed",
    "partition GPU proving task panicked": "prove_failed",
    "GPU proving failed": "prove_failed",
    "GPU proving task panicked": "prove_failed",
    "GPU prove start failed": "prove_failed",
    "GPU prove start task panicked": "prove_failed",
    "cudaHostAlloc failed": "cuda_alloc",
}
"""Messages that are counted as trouble: the same name with an error text in it is the same trouble.

Two of them are told twice: on the lines counted here follow the pool's `pinned pool: cudaHostAlloc failed` and the
evictor's `evicted for memory pressure`.
"""
