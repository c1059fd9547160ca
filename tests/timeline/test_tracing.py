from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest

from cuzk_agent.timeline.lines import KernelTiming, TracingLine
from cuzk_agent.timeline.tracing import parse_kernel_timing, parse_tracing, strip_escapes

AT = "2026-11-30T15:54:24.838531Z"
AT_MS = 1796054064838.531
WDPOST = "wdpost-1000-3-[3 253 250 0 17 9 201 77]"
WORKER = f"gpu_worker{{worker_id=1 gpu=0 job_id={WDPOST} proof_kind=window-post batch_size=1 partition=Some(3)}}"
WORKER_FIELDS = {
    "worker_id": "1",
    "gpu": "0",
    "job_id": WDPOST,
    "proof_kind": "window-post",
    "batch_size": "1",
    "partition": "3",
}


def coloured(line: str) -> bytes:
    """The line as the daemon's formatter colours it."""

    def keys(text: str) -> str:
        return re.sub(r"\b([a-z_]+)=", "\x1b[3m\\1\x1b[0m\x1b[2m=\x1b[0m", text)

    match = re.fullmatch(r"(\S+) +([A-Z]+) (?:(\w+)\{(.*)\}: )?([\w:]+): (.*)", line, re.DOTALL)
    assert match is not None
    stamp, level, span, fields, target, body = match.groups()
    out = f"\x1b[2m{stamp}\x1b[0m \x1b[32m{level:>5}\x1b[0m "
    if span is not None:
        out += f"\x1b[1m{span}\x1b[0m\x1b[1m{{\x1b[0m{keys(fields)}\x1b[1m}}\x1b[0m\x1b[2m:\x1b[0m "
    return f"{out}\x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m {keys(body)}".encode()


MESSAGES: list[tuple[str, str, str, dict[str, str]]] = [
    # span, message, fields as written, fields as read
    ("", "starting cuzk engine", "pipeline_enabled=true", {"pipeline_enabled": "true"}),
    (
        "",
        "initializing GPU workers",
        "num_gpus=2 gpu_workers_per_device=2 total_workers=4 gpus=[0, 1]",
        {"num_gpus": "2", "gpu_workers_per_device": "2", "total_workers": "4", "gpus": "[0, 1]"},
    ),
    ("", "pipeline GPU worker started", "worker_id=3 gpu=1 sub_id=1", {"worker_id": "3", "gpu": "1", "sub_id": "1"}),
    (
        "",
        "job enqueued",
        f'job_id={WDPOST} proof_kind=window-post priority="Normal" queue_position=0',
        {"job_id": WDPOST, "proof_kind": "window-post", "priority": "Normal", "queue_position": "0"},
    ),
    (
        "",
        "job enqueued",
        'job_id="a b=c \\"d\\"" proof_kind=porep-c2 priority=High queue_position=2',
        {"job_id": 'a b=c "d"', "proof_kind": "porep-c2", "priority": "High", "queue_position": "2"},
    ),
    ("", "job dequeued for proving", f"job_id={WDPOST} proof_kind=x", {"job_id": WDPOST, "proof_kind": "x"}),
    (
        "",
        "dispatching per-partition synthesis (budget-gated)",
        "job_id=porep-1 num_partitions=10 budget_available_gib=300",
        {"job_id": "porep-1", "num_partitions": "10", "budget_available_gib": "300"},
    ),
    (
        "",
        "dispatching per-partition SnapDeals synthesis (budget-gated)",
        "job_id=snap-1 num_partitions=16 budget_available_gib=300",
        {"job_id": "snap-1", "num_partitions": "16", "budget_available_gib": "300"},
    ),
    (
        "",
        "loading SRS from disk",
        "circuit_id=porep-32g path=/data/zk/params/v28 stacked.params size_gib=44",
        {"circuit_id": "porep-32g", "path": "/data/zk/params/v28 stacked.params", "size_gib": "44"},
    ),
    (
        "",
        "SRS loaded successfully",
        "circuit_id=porep-32g elapsed_ms=300",
        {"circuit_id": "porep-32g", "elapsed_ms": "300"},
    ),
    (
        "",
        "partition synthesis complete, pushing to GPU queue",
        "job_id=porep-1 partition=4 synth_ms=257",
        {"job_id": "porep-1", "partition": "4", "synth_ms": "257"},
    ),
    (
        WORKER,
        "GPU_TIMING hot_path pre-prove overhead",
        "worker_id=1 partition=Some(3) status_ms=0 total_overhead_ms=2",
        {"worker_id": "1", "partition": "3", "status_ms": "0", "total_overhead_ms": "2"},
    ),
    (
        WORKER,
        "GPU_TIMING prove_start returned",
        "worker_id=1 partition=None spawn_blocking_wall_ms=57",
        {"worker_id": "1", "spawn_blocking_wall_ms": "57"},
    ),
    ("", "FIN_TIMING finalizer partition", "worker_id=0 finish_ms=506", {}),
    (
        "",
        "partition GPU prove complete",
        "job_id=porep-1 partition=4 gpu_ms=73 filled=0",
        {"job_id": "porep-1", "partition": "4", "gpu_ms": "73", "filled": "0"},
    ),
    (
        "",
        "Phase 7: all partitions complete, proof assembled",
        "job_id=porep-1 proof_len=1920 total_ms=511 synth_ms=1533 gpu_ms=925",
        {"job_id": "porep-1", "proof_len": "1920", "total_ms": "511", "synth_ms": "1533", "gpu_ms": "925"},
    ),
    ("", "Phase 7: PoRep proof self-check PASSED", "job_id=porep-1", {"job_id": "porep-1"}),
    (
        "",
        "Phase 7: PoRep proof self-check FAILED — proof will NOT be returned to caller",
        "job_id=porep-1 proof_len=1920 sector=7 miner=1000",
        {"job_id": "porep-1", "proof_len": "1920", "sector": "7", "miner": "1000"},
    ),
    (
        "",
        "Phase 7: PoRep proof self-check error — proof will NOT be returned to caller",
        "job_id=porep-1 error=bad partition=3",
        {"job_id": "porep-1", "error": "bad partition=3"},
    ),
    (
        "",
        "Phase 7: per-partition verification results (invalid partitions produced bad proofs)",
        "job_id=porep-1 valid_partitions=[0, 1] invalid_partitions=[2]",
        {"job_id": "porep-1", "valid_partitions": "[0, 1]", "invalid_partitions": "[2]"},
    ),
    (
        "",
        "Batched PoRep proof self-check PASSED",
        "job_id=porep-1 sector_idx=1",
        {"job_id": "porep-1", "sector_idx": "1"},
    ),
    (
        "",
        "proof completed successfully (pipeline)",
        "proof_len=192 total_ms=640 queue_ms=0 synth_ms=64 gpu_ms=101",
        {"proof_len": "192", "total_ms": "640", "queue_ms": "0", "synth_ms": "64", "gpu_ms": "101"},
    ),
    (
        "",
        "sector proof delivered from batch",
        "sector_idx=1 job_id=porep-1 proof_len=1920 total_ms=5",
        {"sector_idx": "1", "job_id": "porep-1", "proof_len": "1920", "total_ms": "5"},
    ),
    *(
        (
            "",
            message,
            f"error=foo bar=baz partition=9 in job_id=Q job_id={WDPOST} partition=1",
            {"error": "foo bar=baz partition=9 in job_id=Q", "job_id": WDPOST, "partition": "1"},
        )
        for message in [
            "partition synthesis failed",
            "partition synthesis task panicked",
            "partition GPU proving failed",
            "partition GPU proving task panicked",
        ]
    ),
    (
        WORKER,
        "GPU prove start failed",
        "error=CUDA error: code=2 partition=7\n  at groth16_cuda.cu:512",
        {"error": "CUDA error: code=2 partition=7\n  at groth16_cuda.cu:512"},
    ),
    *(
        ("", message, "error=x job_id=y", {"error": "x job_id=y"})
        for message in ["synthesis failed", "GPU proving failed", "proof failed"]
    ),
    ("", "skipping synthesis for failed job", "job_id=porep-1 partition=1", {"job_id": "porep-1", "partition": "1"}),
    (
        WORKER,
        "skipping GPU prove for failed partitioned job",
        "job_id=porep-1 partition=Some(1)",
        {"job_id": "porep-1", "partition": "1"},
    ),
    ("", "discarding GPU result for failed job", "job_id=porep-1 partition=1", {"job_id": "porep-1", "partition": "1"}),
    (
        "",
        "acquire request exceeds total budget — will block until possible",
        "amount_gib=400 total_gib=300",
        {"amount_gib": "400", "total_gib": "300"},
    ),
    ("", "cudaHostAlloc failed", "size_gib=2.5 cuda_err=2", {"size_gib": "2.5", "cuda_err": "2"}),
    ("", "SRS evicted", "circuit_id=porep-32g", {"circuit_id": "porep-32g"}),
    ("", "received SIGINT, shutting down", "", {}),
    ("", "shutting down cuzk engine", "", {}),
    ("", "a message nobody asked about: it says", "so_and=so", {}),
]


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "coloured"])
@pytest.mark.parametrize(("span", "message", "written", "fields"), MESSAGES, ids=[m[1][:40] for m in MESSAGES])
def test_messages(span: str, message: str, written: str, fields: Mapping[str, str], colour: bool) -> None:
    line = f"{AT}  INFO {span + ': ' if span else ''}cuzk_core::engine: {message}{' ' if written else ''}{written}"
    read = parse_tracing(coloured(line) if colour else line.encode())
    assert read == TracingLine(AT_MS, "INFO", WORKER_FIELDS if span else {}, message, fields)


@pytest.mark.parametrize(
    ("spans", "fields"),
    [
        ("a{x=1}:b{y=2}", {"y": "2"}),
        ("a{x=1}:b", {"x": "1"}),
        ('a:b{y=None z=Some("q")}', {"z": "q"}),
        ("a", {}),
        ("gpu_prove{path={odd: one} y=2}", {"path": "{odd: one}", "y": "2"}),
    ],
)
def test_spans(spans: str, fields: Mapping[str, str]) -> None:
    read = parse_tracing(f"{AT} ERROR {spans}: cuzk_core::engine: proof failed error=no: way".encode())
    assert read == TracingLine(AT_MS, "ERROR", fields, "proof failed", {"error": "no: way"})


@pytest.mark.parametrize(
    ("stamp", "unix_ms"),
    [
        ("1970-01-01T00:00:01Z", 1000.0),
        ("1970-01-01T00:00:01.5Z", 1500.0),
        ("1970-01-01T00:00:01.000250Z", 1000.25),
        ("1970-01-01T00:00:01.123456789Z", 1123.456789),
    ],
)
def test_time_stamps(stamp: str, unix_ms: float) -> None:
    read = parse_tracing(f"{stamp}  INFO cuzk_daemon: hello".encode())
    assert read is not None
    assert read.unix_ms == pytest.approx(unix_ms, abs=1e-9)
    assert read.message == "hello"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"2026-11-30",
        b"2026-13-30T15:54:24.838531Z  INFO cuzk_daemon: hello",
        b"2026-11-30T15:54:24.838531Z  LOUD cuzk_daemon: hello",
        b"note: 2026-11-30T15:54:24.838531Z  INFO cuzk_daemon: hello",
        "٢٠٢٦-11-30T15:54:24Z  INFO cuzk_daemon: hello".encode(),
    ],
)
def test_other_lines(line: bytes) -> None:
    assert parse_tracing(line) is None


@pytest.mark.parametrize("unit", ["a{}:", "a{x=1}:", "a:", "{", '" a="b ', " a=", "error=x job_id=y partition=1 "])
def test_repetition_stays_cheap(unit: str) -> None:
    line = f"{AT}  INFO {unit * 20_000}: partition GPU proving failed error={unit * 20_000}".encode()
    begin = time.process_time()
    parse_tracing(line)
    assert time.process_time() - begin < 2


def test_kernel_timings() -> None:
    line = b"CUZK_TIMING: gpu_tid=0 tail_msm_ms=4 gpu_total_ms=41"
    assert parse_kernel_timing(line) == KernelTiming({"gpu_tid": 0, "tail_msm_ms": 4, "gpu_total_ms": 41})
    assert parse_kernel_timing(b"CUZK_TIMING: a_ms=-1 b_ms=7 c_ms=99999999999") == KernelTiming({"b_ms": 7})
    assert parse_kernel_timing(b"CUZK_TIMING: set pool release threshold to MAX on gpu 0") is None
    assert parse_kernel_timing(b"CUZK_NTT_H: d_b_alloc=3") is None


def test_escapes_are_stripped() -> None:
    assert strip_escapes(b"\x1b[2mtime\x1b[0m \x1b[38;5;9mx\x1b[Ky") == b"time xy"
