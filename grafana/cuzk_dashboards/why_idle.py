"""Why idle: which stage is the bottleneck, and by how much?"""

from __future__ import annotations

from cuzk_dashboards.kit import (
    FAULTS,
    GPU,
    HOST,
    LOG,
    NOW,
    RANGE,
    Board,
    Query,
    above,
    go_to,
    gpu_variable,
    graph,
    increase,
    instance_variable,
    number,
    one_each,
    quantiles,
    rate,
    restarts,
    source_variable,
)
from cuzk_dashboards.palette import BAD, BOUNDARIES, CAUSES, MEASURE, STAGES, Colours

WORK = f'{GPU}, cause!="no_work"'
FAULTY = f'{GPU}, cause=~"{FAULTS}"'
BAD_PARTITION = f'{GPU}, kind="bad_partition"'
IDLE = "cuzk_gpu_idle_seconds_total"
BUSY = "cuzk_gpu_logged_busy_seconds_total"
PROVER = "instance, source"
WITH_WORK = tuple(cause for cause in CAUSES if cause != "no_work")
SPANS = "cuzk_gpu_spans_total"

WAITS: Colours = {"mutex_wait": "#CC79A7", "barrier_wait": "#E69F00", "pre_lock_cpu": "#56B4E9"}
KERNELS: Colours = {
    "ntt_msm_h": "#117733",
    "batch_add": "#44AA99",
    "tail_msm": "#B5CF3A",
    "prep_msm": "#88CCEE",
    "b_g2_msm": "#4477AA",
}
SUPPLY_AND_DEMAND: Colours = {
    "synthesis finishes": STAGES["synth"],
    "synthesis could give": STAGES["synth"],
    "GPUs take": STAGES["gpu"],
    "GPUs could take": STAGES["gpu"],
}
LOADS: Colours = {"being loaded": CAUSES["blocked"], "loaded": MEASURE}
RESOURCES: Colours = {"memory_budget": "#F0E442", "srs_evicted": CAUSES["blocked"], "cuda_alloc": "#AA4499"}
FAILURES: Colours = {
    "synthesis_failed": "#DDCC77",
    "prove_failed": "#AA4499",
    "selfcheck": "#88CCEE",
    "bad_partition": "#D55E00",
}


def _could_take(window: str) -> str:
    """Units a second that the GPUs would take if they were always busy; nothing where they never were."""
    spans = f"sum by ({PROVER}) (rate({SPANS}{{{GPU}}}[{window}]))"
    busy = f"sum by ({PROVER}) (rate({BUSY}{{{GPU}}}[{window}]))"
    return f"sum({spans} / ({busy} > 0) * count by ({PROVER}) ({SPANS}{{{GPU}}}))"


def _could_give(window: str) -> str:
    """Units a second that synthesis finishes while it is at work; nothing where it finished none."""
    finished = f"sum by ({PROVER}) (rate(cuzk_synth_seconds_count{{{LOG}}}[{window}]))"
    at_work = f"sum by ({PROVER}) (rate(cuzk_synth_active_seconds_total{{{LOG}}}[{window}]))"
    return f"sum(({finished} > 0) / ({at_work} > 0))"


def _mean_of(phases: Colours) -> Query:
    names = "|".join(f"{name}_ms" for name in phases)
    selector = f'{LOG}, phase=~"{names}"'
    mean = (
        f"sum by (phase) (rate(cuzk_kernel_phase_seconds_sum{{{selector}}}[{NOW}])) / "
        f"(sum by (phase) (rate(cuzk_kernel_phase_seconds_count{{{selector}}}[{NOW}])) > 0)"
    )
    return Query(f'label_replace({mean}, "phase", "$1", "phase", "(.*)_ms")', "{{phase}}")


def _trouble(kinds: Colours) -> Query:
    selector = f'{LOG}, kind=~"{"|".join(kinds)}"'
    return Query(f"round(sum by (kind) (increase(cuzk_trouble_total{{{selector}}}[{NOW}])))", "{{kind}}")


def board() -> Board:
    """Where an operator goes from Prover."""
    board = Board(
        "cuzk-why-idle",
        "cuzk / Why idle",
        "Why GPUs idle although there is work: synthesis, what holds it back, the hand-off, or locks.",
        [instance_variable(), source_variable(), gpu_variable("cuzk_gpu_spans_total", LOG)],
        restarts(LOG, HOST),
    )
    bad_partitions = f"round({increase('cuzk_trouble_total', BAD_PARTITION, NOW, by='instance, source, gpu')})"
    time_with_work = f"({increase(BUSY, GPU)} + {increase(IDLE, WORK)})"
    board.row()
    board.line(
        4,
        number(
            "Largest loss",
            "The cause to which most of the time with work was lost, and its share, over the range shown; where "
            "nothing was lost it may be empty. starved: faster or more synthesis. blocked: see what holds synthesis "
            "back. handoff: see locks. fill: more proofs at once.",
            Query(
                f"topk(1, {increase(IDLE, WORK, by='cause')} / on () group_left () ({time_with_work} > 0) > 0.0005)",
                "{{cause}}",
            ),
            unit="percentunit",
            decimals=1,
            colours=CAUSES,
            name=True,
            empty="nothing lost",
        ),
        number(
            "Lost to faults",
            "The share of the time in which GPUs were starved, blocked, or waited for the hand-off, of all in which "
            "they could have been busy, over the range shown; without work it may be empty. Above a fifth it is "
            "worth a change of settings.",
            Query(f"{increase(IDLE, FAULTY)} / ({increase(BUSY, GPU)} + {increase(IDLE, FAULTY)} > 0)"),
            unit="percentunit",
            decimals=1,
            limits=above(0.1, 0.2),
            empty="no work",
        ),
        number(
            "Synthesis / GPUs",
            "Units a second that synthesis finishes while it is at work, by those that the GPUs would take if they "
            "were always busy, over the range shown; without work it may be empty. Below 100 % synthesis is the "
            "bottleneck, by what is missing; at 100 % and more the GPUs are, and hold it back.",
            Query(f"{_could_give(RANGE)} / {_could_take(RANGE)}"),
            unit="percentunit",
            decimals=0,
            empty="no work",
        ),
        number(
            "Ready now",
            "Units that are synthesized and wait for a GPU, now. Always some: the GPUs are the bottleneck. None, and "
            "GPUs idle: synthesis is.",
            Query(f'sum(cuzk_partitions_in_flight{{{LOG}, stage="ready"}})'),
            unit="none",
            decimals=0,
        ),
    )
    board.line(
        10,
        graph(
            "Idle although there was work, by cause",
            "How many GPUs idled for what cause, without no_work. Orange, red and purple are faults. Starved: the "
            "CPU does not keep up. Blocked: it has work and does none of it. Handoff: work is ready and is not "
            "started. fill is one proof's latency. unknown: the log has gone silent. Until the log names a GPU it "
            "may be empty.",
            *one_each("cause", WITH_WORK, f"sum(rate({IDLE}{{{GPU}, LABEL}}[{NOW}]))"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours=CAUSES,
            calcs=("mean",),
        ).links(go_to("cuzk-prover", "Prover")),
        graph(
            "Supply and demand",
            "Units a second: what synthesis finishes and GPUs take, and what each could if it never had to wait "
            "(dashed; where it is not at work it may be empty). The lower dashed line is the bottleneck, by its "
            "distance to the other: blue, a faster synthesis helps; green, faster or more GPUs. Work well below "
            "both: there was too little of it, or it was held back.",
            Query(rate("cuzk_synth_seconds_count", LOG), "synthesis finishes"),
            Query(_could_give(NOW), "synthesis could give"),
            Query(rate(SPANS, GPU), "GPUs take"),
            Query(_could_take(NOW), "GPUs could take"),
            unit="suffix:units/s",
            colours=SUPPLY_AND_DEMAND,
            dashed="/could/",
            smallest_step="2m",
            sparse=True,
            decimals=2,
            calcs=("mean",),
        ),
    )
    board.row("Where the gaps are")
    board.line(
        8,
        graph(
            "Within a job, and between two",
            "Closed gaps, as GPUs that idled, for no work too; a gap is booked when it closes, so that long ones stand "
            "out. Within a job: its partitions don't come fast enough. Between two: there are too few jobs at a time, "
            "or the next one's synthesis begins too late. Until the log names a GPU it may be empty.",
            Query(
                f"sum by (boundary) (rate(cuzk_gpu_gap_boundary_seconds_total{{{GPU}}}[{NOW}]))",
                "{{boundary}}",
            ),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours=BOUNDARIES,
        ),
        graph(
            "Gaps an hour by cause",
            "How many gaps closed, by the cause of their largest share; of unknown it may be empty. Many short ones: "
            "each hand-off costs. Few long ones: synthesis pauses.",
            *one_each("cause", WITH_WORK, f"sum(rate(cuzk_gpu_gap_seconds_count{{{GPU}, LABEL}}[{NOW}])) * 3600"),
            unit="none",
            stacked=True,
            colours=CAUSES,
        ),
        graph(
            "Lost to faults by GPU",
            "The share of its time that each GPU was starved, blocked or waited for the hand-off. One that loses "
            "more than its neighbours is served last: look at its workers, and at CUDA_VISIBLE_DEVICES. Until the "
            "log names a GPU it may be empty.",
            Query(
                f"sum by (instance, source, gpu) (rate({IDLE}{{{FAULTY}}}[{NOW}]))",
                "{{instance}} {{source}} {{gpu}}",
            ),
            unit="percentunit",
            maximum=1,
        ),
    )
    board.row("What holds synthesis back")
    board.line(
        8,
        graph(
            "Waiting and in synthesis",
            "Units before the GPU. Waiting with none in synth: blocked, by parameters that load, the memory budget, "
            "a batch that is not full, or the pacer. synth at a flat top: all synthesis workers are at it, more of "
            "them would need more cores and memory.",
            *one_each("stage", ("synth", "waiting"), f"sum(cuzk_partitions_in_flight{{{LOG}, LABEL}})"),
            unit="none",
            decimals=0,
            stacked=True,
            colours=STAGES,
        ),
        graph(
            "Parameters (SRS) being loaded",
            "How many are being loaded from disk, and how many loads ended (bars). A load takes 30 to 90 s, and the "
            "proofs that need it are blocked meanwhile. After a start that is as it should be; again and again: let "
            "the prover do fewer kinds of proof, or give the daemon the memory to keep them all. In the first minutes "
            "it may be empty.",
            Query(f"sum(max_over_time(cuzk_srs_loads_in_progress{{{LOG}}}[{NOW}]))", "being loaded"),
            Query(f"round({increase('cuzk_srs_load_seconds_count', LOG, NOW)})", "loaded"),
            unit="none",
            decimals=0,
            stacked=True,
            colours=LOADS,
            barred="/^loaded$/",
        ),
        graph(
            "Time to load parameters",
            "On average, of the loads that ended; while none ends it may be empty. More than 90 s, or more than "
            "before: the disk is slow, or others read from it too. Faster disks, or more memory for the system's "
            "cache, shorten it.",
            Query(
                f"{rate('cuzk_srs_load_seconds_sum', LOG)} / ({rate('cuzk_srs_load_seconds_count', LOG)} > 0)",
                "a load",
            ),
            unit="s",
            bars=True,
            colours={"a load": MEASURE},
            empty="none in this time",
        ),
    )
    board.row("Hand-off and locks")
    board.line(
        8,
        graph(
            "Ready queue",
            "Units that wait for a GPU, and those that a worker has picked up and not started. A queue while GPUs "
            "idle is the hand-off's fault: look at the locks.",
            *one_each("stage", ("picked_up", "ready"), f"sum(cuzk_partitions_in_flight{{{LOG}, LABEL}})"),
            unit="none",
            decimals=0,
            stacked=True,
            colours=STAGES,
        ),
        quantiles(
            "Wait in the ready queue",
            "From being queued to being picked up; while nothing is picked up it may be empty. Long is good for the "
            "GPU and bad for latency: the GPUs are the bottleneck.",
            "cuzk_ready_wait_seconds",
            LOG,
            exemplars=True,
            empty="nothing picked up in this time",
        ),
        quantiles(
            "Hand-off",
            "From being picked up to GPU_START; while nothing is started it may be empty. More than some "
            "milliseconds: workers wait for a lock that finished proofs hold while they free their memory.",
            "cuzk_handoff_seconds",
            LOG,
            exemplars=True,
            empty="nothing started in this time",
        ),
    )
    board.line(
        8,
        graph(
            "Waits within a proving call",
            "Time a call on average: for the GPU's mutex (another worker has it), at the barrier (kernels wait for "
            "the CPU, with the GPU held and idle), and of the CPU before the lock; while there are no lines of the "
            "C++ prover it may be empty. Long barriers: the CPU is too busy; fewer synthesis workers may prove more.",
            _mean_of(WAITS),
            unit="s",
            stacked=True,
            colours=WAITS,
        ),
        graph(
            "Phases of a proving call",
            "Time a call on average, as the C++ prover logs it, of the kernels (green) and of the CPU's part beside "
            "them (blue); while there are no such lines it may be empty. Compare before and after an update of "
            "driver or daemon.",
            _mean_of(KERNELS),
            unit="s",
            colours=KERNELS,
        ),
    )
    board.row("Memory trouble and failures")
    board.line(
        8,
        graph(
            "Memory trouble",
            "How often a unit asked for more than the whole memory budget (it will never run), parameters (SRS) were "
            "thrown out for others, or pinned memory could not be had. Evictions: kinds of proof push each other out, "
            "and each load takes a minute. Give the daemon more memory, or the kinds to different machines. In the "
            "first minutes it may be empty.",
            _trouble(RESOURCES),
            unit="none",
            bars=True,
            stacked=True,
            colours=RESOURCES,
        ),
        graph(
            "Failures that the log reports",
            "Syntheses and proofs that failed, proofs that failed their check, and bad partitions. bad_partition: a "
            "GPU computes wrongly; the next panel says which. In the first minutes it may be empty.",
            _trouble(FAILURES),
            unit="none",
            bars=True,
            stacked=True,
            colours=FAILURES,
        ),
        graph(
            "Bad partitions by GPU",
            "Partitions whose proof was wrong, by the GPU that computed it, in the range up to each moment. More "
            "than one on a GPU: take it out, and look for XID and ECC errors on the board Chip. In the first minutes "
            "it may be empty.",
            Query(
                f'label_replace({bad_partitions}, "gpu", "unknown", "gpu", "")',
                "{{instance}} {{source}} {{gpu}}",
            ),
            unit="none",
            bars=True,
            stacked=True,
            shades=BAD,
        ).links(go_to("cuzk-chip", "Chip")),
    )
    return board
