"""Writes a long log of one engine in the daemon's line shapes: python benchmarks/make_log.py 1000 > big.log (in MB).

Two GPUs are fed by twelve lanes of synthesis, and 5 % of the lines are TIMELINE lines. The rest is what a talkative
daemon writes: tracing lines with ANSI colours, most of them of no interest, and the C++ prover's.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

LANES = 12
GPUS = 2
PARTITIONS = 10
OTHER_LINES = 102
"""For each unit, beside its 6 TIMELINE lines, 8 of the C++ prover and 4 tracing lines that mean something."""
EPOCH = datetime(2026, 11, 30, tzinfo=UTC)

OTHERS = (
    ("INFO", "bellperson::groth16::prover", "synthesis finished", "constraints=130278869 aux=130169893"),
    ("INFO", "cuzk_core::srs_manager", "SRS cache hit", "circuit_id=porep-32g refs=3"),
    ("DEBUG", "cuzk_core::pinned", "pinned buffer returned", "bytes=4294967296 pool=porep free=11"),
    ("INFO", "storage_proofs_porep::stacked::vanilla::proof", "replicate_phase: layer verified", "layer=7"),
    ("INFO", "cuzk_core::memory", "budget reserved", "gib=14 in_use_gib=188 total_gib=256"),
    (
        "DEBUG",
        "h2::codec::framed_read",
        "received",
        "frame=Headers { stream_id: StreamId(61), flags: (0x4: END_HEADERS) }",
    ),
)


def tracing(at_ms: int, level: str, target: str, message: str, fields: str, span: str = "") -> str:
    """A line as tracing-subscriber colours it."""
    when = (EPOCH + timedelta(milliseconds=at_ms)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    told = "".join(
        f" \x1b[3m{key}\x1b[0m\x1b[2m=\x1b[0m{value}"
        for key, _, value in (field.partition("=") for field in fields.split(" "))
    )
    return (
        f"\x1b[2m{when}\x1b[0m \x1b[32m{level:>5}\x1b[0m {span}\x1b[2m{target}\x1b[0m\x1b[2m:\x1b[0m {message}{told}\n"
    )


def _worker_span(gpu: int, job: str) -> str:
    fields = f"worker_id={gpu} gpu={gpu} job_id={job} proof_kind=porep-c2".split()
    told = " ".join("\x1b[3m{}\x1b[0m\x1b[2m=\x1b[0m{}".format(*field.split("=")) for field in fields)
    return f"\x1b[1mgpu_worker\x1b[0m\x1b[1m{{\x1b[0m{told}\x1b[1m}}\x1b[0m\x1b[2m:\x1b[0m "


def units(chance: random.Random) -> Iterator[tuple[int, str, int]]:
    """(when its lane begins it, job, partition), for ever."""
    lanes = [0] * LANES
    number = 0
    while True:
        for partition in range(PARTITIONS):
            start_ms = heapq.heappop(lanes)
            heapq.heappush(lanes, start_ms + int(chance.gauss(36_000, 2_000)))
            yield start_ms, f"porep-1000-{number}", partition
        number += 1


def lines() -> Iterator[str]:
    """All lines, in their order."""
    chance = random.Random(1)
    pending: list[tuple[int, int, str]] = []
    gpus = [0] * GPUS
    sequence = 0

    def put(at_ms: int, line: str) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(pending, (at_ms, sequence, line))

    for gpu in range(GPUS):
        put(
            0,
            tracing(
                0, "INFO", "cuzk_core::engine", "pipeline GPU worker started", f"worker_id={gpu} gpu={gpu} sub_id=0"
            ),
        )
    for start_ms, job, partition in units(chance):
        while pending and pending[0][0] < start_ms:
            yield heapq.heappop(pending)[2]
        if partition == 0:
            put(
                start_ms,
                tracing(start_ms, "INFO", "cuzk_core::scheduler", "job enqueued", f"job_id={job} proof_kind=porep-c2"),
            )
        ready_ms = start_ms + int(chance.gauss(36_000, 2_000))
        gpu = min(range(GPUS), key=lambda index: gpus[index])
        up_ms = max(ready_ms + 1, gpus[gpu])
        end_ms = gpus[gpu] = up_ms + int(chance.gauss(3_500, 300))
        unit = f"worker={gpu},partition={partition}"
        put(start_ms, f"TIMELINE,{start_ms},SYNTH_START,{job},partition={partition}\n")
        put(ready_ms, f"TIMELINE,{ready_ms},SYNTH_END,{job},partition={partition},synth_ms={ready_ms - start_ms}\n")
        put(ready_ms, f"TIMELINE,{ready_ms},GPU_QUEUE,{job},partition={partition}\n")
        put(up_ms, f"TIMELINE,{up_ms},GPU_PICKUP,{job},{unit}\n")
        put(up_ms, f"TIMELINE,{up_ms},GPU_START,{job},{unit}\n")
        put(end_ms, f"TIMELINE,{end_ms},GPU_END,{job},{unit},gpu_ms={end_ms - up_ms}\n")
        span = _worker_span(gpu, job)
        put(
            up_ms,
            tracing(
                up_ms,
                "INFO",
                "cuzk_core::engine",
                "GPU_TIMING hot_path pre-prove overhead",
                "worker_id=0 total_overhead_ms=0",
                span,
            ),
        )
        put(
            end_ms,
            tracing(
                end_ms,
                "INFO",
                "cuzk_core::engine",
                "partition GPU prove complete",
                f"job_id={job} partition={partition} gpu_ms={end_ms - up_ms} filled=1",
            ),
        )
        put(
            ready_ms,
            tracing(
                ready_ms,
                "INFO",
                "cuzk_core::engine",
                "partition synthesis complete, pushing to GPU queue",
                f"job_id={job} partition={partition} synth_ms={ready_ms - start_ms}",
            ),
        )
        if partition == PARTITIONS - 1:
            put(
                end_ms + 500,
                tracing(
                    end_ms + 500, "INFO", "cuzk_core::engine", "Batched PoRep proof self-check PASSED", f"job_id={job}"
                ),
            )
        for index, text in enumerate(
            (
                "pre_lock_cpu_ms=13 mutex_wait_ms=23",
                "gpu_tid=0 ntt_msm_h_ms=900",
                "gpu_tid=0 barrier_wait_ms=30",
                "gpu_tid=0 batch_add_ms=800",
                "gpu_tid=0 tail_msm_ms=300 gpu_total_ms=2900",
                "prep_msm_ms=320",
                "mutex_held_ms=2901 total_start_fn_ms=3001",
                "b_g2_msm_ms=300 num_circuits=1",
            )
        ):
            put(up_ms + 300 * index, f"CUZK_TIMING: {text}\n")
        for _ in range(OTHER_LINES):
            at_ms = start_ms + chance.randrange(40_000)
            put(at_ms, tracing(at_ms, *chance.choice(OTHERS)))


def main() -> None:
    """Write as many MB as asked for."""
    left = int(float(sys.argv[1]) * 1e6)
    for line in lines():
        data = line.encode()
        sys.stdout.buffer.write(data)
        left -= len(data)
        if left <= 0:
            return


if __name__ == "__main__":
    main()
