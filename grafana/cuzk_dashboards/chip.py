"""Chip: is the GPU really working, and is it well?"""

from __future__ import annotations

from cuzk_dashboards.kit import (
    CHIP,
    GPU,
    HOST,
    LOG,
    NOW,
    RANGE,
    Board,
    Column,
    Query,
    above,
    below,
    go_to,
    gpu_variable,
    graph,
    grid,
    increase,
    instance_variable,
    none_is_good,
    number,
    rate,
    restarts,
    source_variable,
    states,
    steps,
    unit_of,
    width,
)
from cuzk_dashboards.palette import BAD, GOOD, MEASURE, QUIET, USES, WARN, Colours

DRIVERLESS = "without an NVIDIA driver it may be empty"
EACH = "{{instance}} GPU {{gpu}}"
BY_GPU = "instance, gpu"
UNCORRECTED = f'{CHIP}, kind="uncorrected"'


def _by_gpu(part: str, whole: str, selector: str, whole_selector: str) -> str:
    return (
        f"sum by ({BY_GPU}) (rate({part}{{{selector}}}[{NOW}])) / "
        f"(sum by ({BY_GPU}) (rate({whole}{{{whole_selector}}}[{NOW}])) > 0)"
    )


COVERAGE = _by_gpu("cuzk_gpu_chip_sampled_seconds_total", "cuzk_gpu_chip_observed_seconds_total", CHIP, CHIP)
THROTTLED: Colours = {
    "hw_slowdown": BAD,
    "hw_thermal_slowdown": "#AA4499",
    "hw_power_brake_slowdown": "#CC79A7",
    "sw_thermal_slowdown": "#E69F00",
    "sw_power_cap": MEASURE,
    "applications_clocks_setting": "#B3D4F2",
    "display_clock_setting": "#88CCEE",
    "sync_boost": QUIET,
}
"""Warm where something is wrong."""


def board() -> Board:
    """What NVML knows, beside what the log says."""
    board = Board(
        "cuzk-chip",
        "cuzk / Chip",
        "What the GPUs really did, as NVML has it, beside what the log says; power, energy, clocks and health.",
        [instance_variable(), source_variable(), gpu_variable("cuzk_nvml_up", HOST)],
        restarts(LOG, HOST),
    )
    board.row()
    board.line(
        4,
        number(
            "Busy",
            f"The share of the time in which kernels ran, over the range shown; {DRIVERLESS}. Low while spans are "
            "open: see occupancy.",
            Query(
                f"{increase('cuzk_gpu_chip_busy_seconds_total', CHIP)} / "
                f"({increase('cuzk_gpu_chip_sampled_seconds_total', CHIP)} > 0)"
            ),
            unit="percentunit",
            decimals=1,
        ),
        number(
            "Occupied",
            "How much of the time with open spans the chip worked, over the range shown; without spans or driver it "
            "may be empty. Below two thirds, spans are mostly waits: for locks, for the CPU, for memory. A second "
            "worker on the GPU fills them.",
            Query(
                f"{increase('cuzk_gpu_span_busy_seconds_total', GPU)} / "
                f"({increase('cuzk_gpu_span_sampled_seconds_total', GPU)} > 0)"
            ),
            unit="percentunit",
            decimals=1,
            limits=below(0.5, 0.65),
        ),
        number(
            "Unlogged",
            f"The share of the time in which the chip was busy outside all spans, over the range shown; {DRIVERLESS}. "
            "Somebody else is on the GPU: the panel of processes says how many, nvidia-smi says who.",
            Query(
                f"{increase('cuzk_gpu_unlogged_busy_seconds_total', CHIP)} / "
                f"({increase('cuzk_gpu_chip_sampled_seconds_total', CHIP)} > 0)"
            ),
            unit="percentunit",
            decimals=1,
            limits=above(0.01, 0.05),
        ),
        number(
            "Coverage",
            f"The share of the time that NVML's samples cover, over the range shown; {DRIVERLESS}. If it is low, do "
            "not trust what is said about the chip: the agent was held up, or the driver gives few samples.",
            Query(
                f"clamp_max({increase('cuzk_gpu_chip_sampled_seconds_total', CHIP)} / "
                f"({increase('cuzk_gpu_chip_observed_seconds_total', CHIP)} > 0), 1)"
            ),
            unit="percentunit",
            decimals=1,
            limits=below(0.8, 0.95),
        ),
        number(
            "Power",
            f"What all GPUs shown drew together, on average of the range shown; {DRIVERLESS}. What of it went into "
            "proofs is below.",
            Query(f"sum(avg_over_time(cuzk_gpu_power_watts{{{CHIP}}}[{RANGE}]))"),
            unit="watt",
            decimals=1,
        ),
        number(
            "XID, ECC",
            f"XID errors, and memory errors that could not be corrected, in the range shown; {DRIVERLESS}. Any is a "
            "reason to look at the kernel's log; one that repeats, to take the GPU out.",
            Query(f"round({increase('cuzk_gpu_xid_errors_total', CHIP)})", "XID"),
            Query(f"round({increase('cuzk_gpu_ecc_errors_total', UNCORRECTED)})", "ECC"),
            name=True,
            unit="none",
            decimals=0,
            limits=none_is_good(),
        ),
    )
    board.line(
        9,
        graph(
            "Chip busy beside open spans",
            "How many chips worked within spans (green) and outside (yellow), and how many GPUs had a span open "
            f"(line); {DRIVERLESS}. The room between green and the line is time that the log calls busy and the chip "
            "does not.",
            Query(rate("cuzk_gpu_span_busy_seconds_total", GPU), "busy in spans"),
            Query(rate("cuzk_gpu_unlogged_busy_seconds_total", CHIP), "busy outside"),
            Query(rate("cuzk_gpu_logged_busy_seconds_total", GPU), "spans open"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours={"busy in spans": GOOD, "busy outside": WARN, "spans open": "#D9D9D9"},
            dashed="/spans open/",
            empty="not measured",
        ).links(go_to("cuzk-prover", "Prover")),
        graph(
            "Span occupancy by GPU",
            "How much of its open spans each chip worked; without spans or driver it may be empty. A GPU below the "
            "others: compare its clocks, its throttling and its workers.",
            Query(_by_gpu("cuzk_gpu_span_busy_seconds_total", "cuzk_gpu_span_sampled_seconds_total", GPU, GPU), EACH),
            unit="percentunit",
            maximum=1,
            smallest_step="1m",
            sparse=True,
            empty="not measured",
        ),
    )
    board.row("Power and energy")
    board.line(
        8,
        graph(
            "Power by GPU",
            f"What each GPU draws, on average of some scrapes; {DRIVERLESS}. One that stays near idle while its spans "
            "are open is waiting.",
            Query(f"avg_over_time(cuzk_gpu_power_watts{{{CHIP}}}[{NOW}])", EACH),
            unit="watt",
            empty="not measured",
        ),
        graph(
            "Power by what it went into",
            f"Energy over time, by use; {DRIVERLESS}. A job's share is booked when it is decided, so that it comes in "
            "steps. wasted: for jobs that failed or ran twice. unlogged: for somebody else. idle: what waiting costs.",
            Query(f"sum by (use) (rate(cuzk_gpu_energy_joules_total{{{CHIP}}}[{NOW}]))", "{{use}}"),
            unit="watt",
            stacked=True,
            colours=USES,
            calcs=("mean",),
            empty="not measured",
        ),
    )
    board.row("Clocks, memory and heat")
    board.line(
        8,
        graph(
            "Clock",
            f"Of the multiprocessors; {DRIVERLESS}. Lower under load than at rest: throttled, see beside.",
            Query(f"cuzk_gpu_sm_clock_hertz{{{CHIP}}}", EACH),
            unit="hertz",
            empty="not measured",
        ),
        graph(
            "Throttled by reason",
            "How many GPUs' clocks were held down, by reason; while none are, it may be empty. sw_power_cap under "
            "load is how GPUs are built; thermal reasons and hw_slowdown are for whoever cools the machine.",
            Query(f"sum by (reason) (rate(cuzk_gpu_clock_throttled_seconds_total{{{CHIP}}}[{NOW}])) > 0", "{{reason}}"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours=THROTTLED,
            empty="not throttled, or not measured",
        ),
        graph(
            "Temperature",
            f"Of each GPU; {DRIVERLESS}. Steady below 80 °C is well; from 85 °C on it will throttle.",
            Query(f"cuzk_gpu_temperature_celsius{{{CHIP}}}", EACH),
            unit="celsius",
            limits=steps((None, GOOD), (80, WARN), (85, BAD)),
            empty="not measured",
        ),
    )
    board.line(
        8,
        graph(
            "Memory",
            f"The most that was in use on each GPU, and what the largest has (dashed); {DRIVERLESS}. Near the dashed "
            "line allocations fail: fewer workers on the GPU, or nobody else on it.",
            Query(f"max_over_time(cuzk_gpu_memory_used_bytes{{{CHIP}}}[{NOW}])", EACH),
            Query(f"max(cuzk_gpu_memory_total_bytes{{{CHIP}}})", "there is"),
            unit="bytes",
            colours={"there is": "#D9D9D9"},
            dashed="/^there is$/",
            empty="not measured",
        ),
        graph(
            "Processes",
            f"Processes that use each GPU; {DRIVERLESS}. More than one daemon, and the board Prover shows a part only.",
            Query(f"cuzk_gpu_compute_processes{{{CHIP}}}", EACH),
            unit="none",
            decimals=0,
            empty="not measured",
        ),
        graph(
            "PCIe",
            "Traffic to (rx) and from (tx) the GPUs; unless gpu.pcie_throughput is on it may be empty, because "
            "asking blocks for 20 ms. It fills with the parameters of each proof: a link that is slower than its "
            "neighbours is worth a look.",
            Query(f"sum by (direction) (cuzk_gpu_pcie_bytes_per_second{{{CHIP}}})", "{{direction}}"),
            unit="binBps",
            empty="gpu.pcie_throughput is off",
        ),
    )
    board.row("Health")
    board.line(
        8,
        states(
            "NVML by GPU",
            f"Whether each GPU can be read, and in what state it is where it can't; {DRIVERLESS}. lost: it has fallen "
            "off the bus, which a reboot mends. hung: a call does not return.",
            Query(f"cuzk_nvml_up{{{CHIP}}}", EACH),
            Query(f'(cuzk_nvml_state{{{CHIP}, state!~"up|starting"}} == 1) - 1', f"{EACH}: {{{{state}}}}"),
            empty="not measured",
        ),
        graph(
            "Errors",
            "XID and memory errors; while there are none it may be empty. corrected ones now and then are harmless. "
            "XID 79 is a lost GPU, 48 and 94 are memory, 13 and 31 are the program's.",
            Query(
                f"round(sum by ({BY_GPU}) (increase(cuzk_gpu_xid_errors_total{{{CHIP}}}[{NOW}]))) > 0", f"XID {EACH}"
            ),
            Query(
                f"round(sum by ({BY_GPU}, kind) (increase(cuzk_gpu_ecc_errors_total{{{CHIP}}}[{NOW}]))) > 0",
                f"ECC {{{{kind}}}} {EACH}",
            ),
            unit="none",
            bars=True,
            stacked=True,
            empty="none, or not measured",
            colours={"XID": BAD, "ECC uncorrected": WARN, "ECC corrected": "#6E7681"},
        ),
        graph(
            "Coverage by GPU",
            f"The share of the time that samples cover; {DRIVERLESS}. Holes make all other numbers here less certain.",
            Query(f"clamp_max({COVERAGE}, 1)", EACH),
            unit="percentunit",
            maximum=1,
            empty="not measured",
        ),
    )
    board.line(
        8,
        grid(
            "GPUs",
            f"What they are; {DRIVERLESS}. Index and bus id are NVML's: gpu.map in the agent's configuration says "
            "which of them the daemon means by its ordinals. The method is where chip-busy seconds come from: "
            "polling is coarser than samples.",
            [
                Column("instance"),
                Column("gpu", properties=[width(60)]),
                Column("model"),
                Column(
                    "last XID",
                    f"max by ({BY_GPU}) (cuzk_gpu_xid_last_timestamp_seconds{{{CHIP}}}) * 1000",
                    properties=[*unit_of("dateTimeAsIso"), width(180)],
                ),
                Column("method", properties=[width(100)]),
                Column("driver_version", properties=[width(130)]),
                Column("pci_bus_id", properties=[width(170)]),
                Column("uuid", properties=[width(370)]),
                Column(
                    "known",
                    f"max by ({BY_GPU}, model, driver_version, pci_bus_id, uuid) (cuzk_gpu_info{{{CHIP}}})",
                    hidden=True,
                ),
                Column(
                    "measured",
                    f"max by ({BY_GPU}, method) (cuzk_gpu_chip_method{{{CHIP}}} == 1)",
                    hidden=True,
                ),
            ],
            empty="no GPU known",
        ),
    )
    return board
