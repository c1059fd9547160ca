"""Prover: is the GPU earning?"""

from __future__ import annotations

from cuzk_dashboards.kit import (
    CHIP,
    GPU,
    HOST,
    LOG,
    NOW,
    RANGE,
    Board,
    Query,
    above,
    bars,
    below,
    by_kind,
    earning,
    go_to,
    gpu_variable,
    graph,
    heat,
    increase,
    instance_variable,
    none_is_good,
    number,
    one_each,
    quantiles,
    rate,
    restarts,
    source_variable,
)
from cuzk_dashboards.palette import BAD, BUSY, CAUSES, KINDS, OUTCOMES, STAGES, UTILIZATION, WARN

WORK = f'{GPU}, cause!="no_work"'
PROVED = f'{LOG}, outcome="proved"'
NOT_PROVED = f'{LOG}, outcome!="proved"'


def _share_of_time(seconds: str) -> str:
    """What a counter has of the time of the GPUs that it exists for."""
    gpu = "instance, source, gpu"
    time = f"sum by ({gpu}) (rate(cuzk_gpu_idle_seconds_total{{{GPU}}}[{NOW}]))"
    busy = f"sum by ({gpu}) (rate(cuzk_gpu_logged_busy_seconds_total{{{GPU}}}[{NOW}]))"
    return f"{rate(seconds, GPU)} / sum(({busy} + {time}) and on ({gpu}) {seconds})"


def board() -> Board:
    """The board to pin."""
    board = Board(
        "cuzk-prover",
        "cuzk / Prover",
        "Is the GPU earning? What provers did with their GPUs' time, and what came of it.",
        [instance_variable(), source_variable(), gpu_variable("cuzk_gpu_spans_total", LOG)],
        restarts(LOG, HOST),
    )
    board.row()
    board.line(
        4,
        number(
            "Earning",
            "The share of the time in which the GPUs had a span open, of all in which they could have: without "
            "no_work, and without fill, the latency of single proofs. Over the range shown; without work it may be "
            "empty. What is missing was lost: the panel below and the board Why idle say to what. A small machine is "
            "starved for life; compare it with its own past.",
            Query(earning(GPU, RANGE)),
            unit="percentunit",
            decimals=1,
            limits=below(0.7, 0.85),
            empty="no work",
        ),
        number(
            "Chip busy",
            "The share of the time in which kernels ran, as NVML has it, over the range shown; without an NVIDIA "
            "driver it may be empty. Much lower than what the log says: spans are open while the chip waits, or one is "
            "stuck. See the board Chip.",
            Query(
                f"{increase('cuzk_gpu_chip_busy_seconds_total', CHIP)} / "
                f"({increase('cuzk_gpu_chip_sampled_seconds_total', CHIP)} > 0)"
            ),
            unit="percentunit",
            decimals=1,
        ),
        number(
            "Proofs/h",
            "Proofs that succeeded, an hour, over the range shown. If it falls, look for what the GPUs lost.",
            Query(f"{rate('cuzk_proof_outcomes_total', PROVED, RANGE)} * 3600"),
            unit="none",
            decimals=1,
        ),
        number(
            "Not proved",
            "Jobs that failed, were abandoned by a daemon that ended, or were lost, in the range shown. Outcomes by "
            "kind are below; the daemon's log says what failed.",
            Query(f"round({increase('cuzk_proof_outcomes_total', NOT_PROVED)})"),
            unit="none",
            decimals=0,
            limits=none_is_good(),
        ),
        number(
            "Energy",
            "What the GPUs took for a proof, on average of all kinds in the range shown; without a proof or without "
            "NVML it may be empty. It rises with waste and with a chip that waits within spans.",
            Query(
                f"{increase('cuzk_proof_energy_joules_sum', LOG)} / "
                f"({increase('cuzk_proof_energy_joules_count', LOG)} > 0)"
            ),
            unit="joule",
            decimals=1,
        ),
        number(
            "Silent",
            "How long the most silent prover has written nothing although it has work, now. Synthesis is silent for "
            "half a minute; after a quarter of an hour the daemon hangs or is dead: look at its process, and at its "
            "log's last line.",
            Query(f"max(cuzk_engine_stalled_seconds{{{LOG}}})"),
            unit="s",
            decimals=0,
            limits=above(300, 900),
        ),
    )
    board.line(
        10,
        graph(
            "What the GPUs did with their time",
            "How many GPUs were busy, and how many were idle for what cause; together that is all of them. Starved, "
            "blocked and handoff are faults: the board Why idle leads on. fill is the latency of single proofs, "
            "no_work is nobody's fault, and of what is unknown the log told nothing. Until the log names a GPU it "
            "may be empty.",
            Query(rate("cuzk_gpu_logged_busy_seconds_total", GPU), "busy"),
            *one_each("cause", CAUSES, f"sum(rate(cuzk_gpu_idle_seconds_total{{{GPU}, LABEL}}[{NOW}]))"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours={**BUSY, **CAUSES},
            calcs=("mean",),
        ).links(go_to("cuzk-why-idle", "Why idle")),
        graph(
            "Utilization: log, kernels, chip",
            "Three answers to how busy the GPUs were: spans were open (log), the prover's own times say that kernels "
            "ran (kernels; not if its lines are off, it may be empty), NVML saw the chip work (chip; not without a "
            "driver). Log far above chip: spans are open while the chip waits, for a lock or for the CPU. Chip above "
            "log: somebody else is on the GPU.",
            Query(_share_of_time("cuzk_gpu_logged_busy_seconds_total"), "log"),
            Query(_share_of_time("cuzk_gpu_kernel_seconds_total"), "kernels"),
            Query(
                f"{rate('cuzk_gpu_chip_busy_seconds_total', CHIP)} / "
                f"({rate('cuzk_gpu_chip_sampled_seconds_total', CHIP)} > 0)",
                "chip",
            ),
            unit="percentunit",
            maximum=1,
            colours=UTILIZATION,
            calcs=("mean",),
        ).links(go_to("cuzk-chip", "Chip")),
    )
    board.row("Gaps")
    board.line(
        8,
        bars(
            "Open gap now",
            "The longest gap that is open now, by cause: it may be long for no_work, and must not be for starved, "
            "blocked or handoff. All 0: every GPU works. Before the first span and without an engine it may be empty.",
            *one_each("cause", CAUSES, f"max(cuzk_gpu_open_gap_seconds{{{GPU}, LABEL}})"),
            unit="s",
            colours=CAUSES,
            empty="no engine",
        ),
        heat(
            "Gap lengths",
            "How many gaps of which length closed, without those for no work. The dots are single gaps: their job is "
            "in the tooltip, to be found in the daemon's log. A band near the length of a synthesis is starvation; a "
            "band below a second is the hand-off. Until the log names a GPU it may be empty.",
            "cuzk_gpu_gap_seconds",
            WORK,
        ),
        quantiles(
            "Gap quantiles",
            "Half, 90 % and 99 % of the gaps were shorter, without those for no work; while no gap closes it may be "
            "empty. A rising p99 with a steady p50: single stalls, see their jobs in the heatmap.",
            "cuzk_gpu_gap_seconds",
            WORK,
            empty="no gaps in this time",
        ),
        widths=(7, 9, 8),
    )
    board.row("Synthesis and units")
    board.line(
        8,
        heat(
            "Synthesis times",
            "How many partitions took how long on the CPU. It moves up when more run at once, or when memory is "
            "short: fewer at a time, or more memory bandwidth, move it down. In the first minutes it may be empty.",
            "cuzk_synth_seconds",
            LOG,
        ),
        by_kind(
            "Synthesis time by kind of proof",
            "Median (dashed) and 90th percentile; while nothing is synthesized it may be empty. Slower than the day "
            "before with the same load: look for another process on the CPUs, and at memory.",
            "cuzk_synth_seconds",
        ),
        widths=(12, 12),
    )
    board.line(
        8,
        graph(
            "Units by stage",
            "Partitions, and proofs that are proved whole, on their way. Many waiting and none ready: the CPU is the "
            "bottleneck. Many ready: the GPUs are, or the hand-off. Waiting with nothing in synth: blocked.",
            *one_each("stage", STAGES, f"sum(cuzk_partitions_in_flight{{{LOG}, LABEL}})"),
            unit="none",
            stacked=True,
            colours=STAGES,
            decimals=0,
        ),
        graph(
            "Oldest unit by stage",
            "How long the oldest unit has been where it is; while there are none it may be empty. One that grows "
            "without end is stuck: its job does not move any more, and will be given up as lost.",
            Query(f"max by (stage) (cuzk_partition_oldest_age_seconds{{{LOG}}})", "{{stage}}"),
            unit="s",
            colours=STAGES,
            empty="nothing in flight",
        ),
        graph(
            "Oldest open job by kind",
            "The age of the oldest job that has not ended; while there are none it may be empty. A WinningPoSt has "
            "to be there within its epoch of 30 s, a WindowPoSt within half an hour: what comes near that must go "
            "first.",
            Query(f"max by (proof_kind) (cuzk_job_oldest_age_seconds{{{LOG}}})", "{{proof_kind}}"),
            unit="s",
            colours=KINDS,
            empty="no open jobs",
        ),
    )
    board.row("Proofs")
    board.line(
        8,
        graph(
            "Proofs an hour by kind",
            "Proofs that succeeded. With work waiting and fewer than yesterday, something above has changed. In the "
            "first minutes it may be empty.",
            Query(
                f"sum by (proof_kind) (rate(cuzk_proof_outcomes_total{{{PROVED}}}[{NOW}])) * 3600",
                "{{proof_kind}}",
            ),
            unit="none",
            bars=True,
            smallest_step="5m",
            colours=KINDS,
        ),
        graph(
            "Not proved, an hour, by outcome",
            "Jobs that failed, were abandoned when their daemon ended, or were lost. Failures of one GPU only: see "
            "bad_partition among the troubles on the board Why idle. In the first minutes it may be empty.",
            Query(
                f"sum by (outcome) (rate(cuzk_proof_outcomes_total{{{NOT_PROVED}}}[{NOW}])) * 3600",
                "{{outcome}}",
            ),
            unit="none",
            bars=True,
            smallest_step="5m",
            colours=OUTCOMES,
        ),
        graph(
            "Wasted GPU time",
            "GPU time a second for jobs that failed or ran twice. failed: a job's other partitions are proved "
            "although one has failed; repeated: a caller submits again what is still being proved, and should wait "
            "longer. Until the log names a GPU it may be empty.",
            Query(
                f"sum by (reason) (rate(cuzk_gpu_wasted_seconds_total{{{GPU}}}[{NOW}]))",
                "{{reason}}",
            ),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours={"failed": BAD, "repeated": WARN},
        ),
    )
    board.line(
        8,
        by_kind(
            "Time to a proof by kind",
            "Median (dashed) and 90th percentile, from submission where the daemon tells it, else from the job's "
            "first event; while no proof ends it may be empty. Latency without load is the CPU's; with load it is "
            "the queue's.",
            "cuzk_proof_latency_seconds",
            smallest_step="5m",
        ),
        graph(
            "Energy a proof by kind",
            "What the GPUs took for one proof, on average; while no proof ends, or without NVML, it may be empty. It "
            "is steady for a kind: more means throttling, waste, or a chip that waits within spans.",
            Query(
                f"sum by (proof_kind) (rate(cuzk_proof_energy_joules_sum{{{LOG}}}[{NOW}])) / "
                f"(sum by (proof_kind) (rate(cuzk_proof_energy_joules_count{{{LOG}}}[{NOW}])) > 0)",
                "{{proof_kind}}",
            ),
            unit="joule",
            colours=KINDS,
            smallest_step="5m",
            sparse=True,
            empty="none in this time",
        ),
        by_kind(
            "Time on the GPU by kind",
            "Median (dashed) and 90th percentile of a unit's span; while none ends it may be empty. It grows when "
            "workers share a GPU: two spans overlap, and each waits for the other's kernels.",
            "cuzk_gpu_span_seconds",
        ),
    )
    return board
