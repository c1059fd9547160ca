"""Agent: can what the other boards show be trusted?"""

from __future__ import annotations

from cuzk_dashboards.kit import (
    HOST,
    LOG,
    NOW,
    YES_OR_NO,
    Board,
    Column,
    Query,
    above,
    coloured_text,
    graph,
    grid,
    increase,
    instance_variable,
    least_width,
    mapped,
    neutral,
    none_is_good,
    number,
    restarts,
    source_variable,
    states,
    unit_of,
)
from cuzk_dashboards.palette import BAD, GOOD, MEASURE, WARN

EACH = "{{instance}} {{source}}"
LOST_LINES = f'{LOG}, outcome="lost"'
SETTLED = f"cuzk_agent_settled_timestamp_seconds{{{LOG}}}"
LATE = f"timestamp({SETTLED}) - {SETTLED}"
OURS = "and on (instance, job) last_over_time(cuzk_agent_info[$__range])"

NVML_TIME = f"sum by (call) (rate(cuzk_agent_nvml_call_seconds_sum{{{HOST}}}[{NOW}]))"
NVML_ERRORS = f"round(sum by (call, error) (increase(cuzk_agent_nvml_errors_total{{{HOST}}}[{NOW}])))"


def _short(calls: str) -> str:
    """Calls of NVML without what all their names begin with."""
    return f'label_replace({calls}, "call", "$1", "call", "nvml(?:Device)?(?:Get)?(.*)")'


def board() -> Board:
    """The agent's own health."""
    board = Board(
        "cuzk-agent",
        "cuzk / Agent",
        "Whether the agents read everything, how late they are, and what they cost.",
        [instance_variable(), source_variable()],
        restarts(LOG, HOST),
    )
    board.row()
    board.line(
        4,
        number(
            "Down",
            "Agents that Prometheus can't scrape now; it also counts one that is still reading a backlog, which "
            "answers 503. Look at the service on that machine.",
            Query(f"sum((up{{{HOST}}} == bool 0) {OURS})"),
            unit="none",
            decimals=0,
            limits=none_is_good(),
        ),
        number(
            "Not read",
            "Logs that can't be followed now. missing: the path is wrong, or the daemon has not started; unreadable: "
            "the agent's user may not read it.",
            Query(f"sum(cuzk_agent_source_up{{{LOG}}} == bool 0)"),
            unit="none",
            decimals=0,
            limits=none_is_good(),
        ),
        number(
            "Settled",
            "How far behind the slowest source's busy, idle and gaps are, now. A quarter of a second, and the time "
            "since the last scrape, is normal; minutes mean that the agent does not come to the end of the log. "
            "Without a clock in the log it may be empty.",
            Query(f"max({LATE})"),
            unit="s",
            decimals=1,
            limits=above(5, 60),
        ),
        number(
            "Unread",
            "Bytes that the logs hold and the agents have not read, now. More than a few kilobytes that do not "
            "shrink: the machine has no CPU left for the agent.",
            Query(f"sum(cuzk_agent_read_lag_bytes{{{LOG}}})"),
            unit="bytes",
            limits=above(1_000_000, 10_000_000),
        ),
        number(
            "Lost",
            "Bytes of logs that were gone before they were read, and lines that the journal says were dropped before "
            "it, in the range shown. Bytes: the log was rotated or truncated faster than the agent came along; keep "
            "one more rotated file. Lines: LogRateLimitIntervalSec=0 in the prover's unit.",
            Query(increase("cuzk_agent_lost_bytes_total", LOG), "bytes"),
            Query(f"round({increase('cuzk_agent_lost_lines_total', LOG)})", "lines"),
            unit="bytes",
            decimals=0,
            limits=none_is_good(),
            name=True,
        ).override_by_name("lines", unit_of("none", 0)),
        number(
            "Unclear",
            "Lines cut apart by other output that could not be put together, and lines of an unknown shape, in the "
            "range shown. More than one in ten thousand: the daemon was updated, or writes to its log from several "
            "processes.",
            Query(
                f"round({increase('cuzk_agent_torn_lines_total', LOST_LINES)} + "
                f"{increase('cuzk_agent_unparsed_lines_total', LOG)})"
            ),
            unit="none",
            decimals=0,
            limits=above(10, 100),
        ),
    )
    board.row("Sources")
    board.line(
        8,
        states(
            "Followed",
            "Whether each log is followed, and why not (of which it may be empty). It reads again by itself once the "
            "cause is gone.",
            Query(f"cuzk_agent_source_up{{{LOG}}}", EACH),
            Query(f'(cuzk_agent_source_state{{{LOG}, state!="following"}} == 1) - 1', f"{EACH}: {{{{state}}}}"),
        ),
        graph(
            "How late",
            "How far behind the settled time is at each scrape; without a clock in the log it may be empty. It grows "
            "while a backlog is read, and when the agent gets no CPU.",
            Query(LATE, EACH),
            unit="s",
        ),
        graph(
            "Unread bytes",
            "What the logs hold and the agents have not read. Spikes are bursts of the daemon; a ramp is an agent "
            "that can't keep up.",
            Query(f"cuzk_agent_read_lag_bytes{{{LOG}}}", EACH),
            unit="bytes",
        ),
    )
    board.line(
        8,
        graph(
            "Lines read",
            "Lines a second. None although the prover works: it logs elsewhere, or at a higher level.",
            Query(f"rate(cuzk_agent_lines_total{{{LOG}}}[{NOW}])", EACH),
            unit="suffix:lines/s",
        ),
        graph(
            "Lines that gave trouble",
            "Late events (moved to the end of what was settled), torn lines that were put together (harmless) or "
            "lost, and lines that could not be understood (of which it may be empty). Late ones make busy and idle a "
            "little wrong; a slow disk or a remote log causes them.",
            Query(f"round(sum(increase(cuzk_agent_late_events_total{{{LOG}}}[{NOW}])))", "late"),
            Query(
                f"round(sum by (outcome) (increase(cuzk_agent_torn_lines_total{{{LOG}}}[{NOW}])))", "torn, {{outcome}}"
            ),
            Query(
                f"sum by (reason) (increase(cuzk_agent_unparsed_lines_total{{{LOG}}}[{NOW}]) > 0)",
                "unparsed, {{reason}}",
            ),
            Query(f"round(sum(increase(cuzk_agent_overlong_lines_total{{{LOG}}}[{NOW}])))", "overlong"),
            unit="none",
            bars=True,
            stacked=True,
            colours={
                "late": WARN,
                "torn, recovered": GOOD,
                "torn, lost": BAD,
                "unparsed,": "#CC79A7",
                "overlong": MEASURE,
            },
        ),
        graph(
            "Rotations and truncations",
            "Of the logs, with NUL bytes that a truncating writer leaves behind (of which it may be empty). A "
            "truncation loses what was not read yet; rotate by renaming instead.",
            Query(f"round(sum(increase(cuzk_agent_rotations_total{{{LOG}}}[{NOW}])))", "rotations"),
            Query(f"round(sum(increase(cuzk_agent_truncations_total{{{LOG}}}[{NOW}])))", "truncations"),
            Query(f"sum(increase(cuzk_agent_nul_bytes_total{{{LOG}}}[{NOW}])) > 0", "NUL bytes"),
            unit="none",
            bars=True,
            stacked=True,
            colours={"rotations": GOOD, "truncations": WARN, "NUL bytes": BAD},
        ),
    )
    board.line(
        7,
        grid(
            "What each log tells",
            "yes if the log tells this kind of thing, no if what rests on it can't be known: without jobs nobody "
            "knows of waiting units, without spans when GPUs work, without gpu_map which GPU, without wall_clock "
            "when. The clock may be off by its uncertainty. Turn the daemon's log level up to info.",
            [
                Column("instance", properties=[least_width(90)]),
                Column("source", properties=[least_width(80)]),
                *(
                    Column(
                        kind,
                        f'max by (instance, source) (cuzk_agent_timeline_evidence{{{LOG}, evidence="{kind}"}})',
                        properties=[*mapped(YES_OR_NO), *coloured_text(neutral()), least_width(85)],
                    )
                    for kind in ("jobs", "spans", "gpu_map", "wall_clock")
                ),
                Column(
                    "clock off by",
                    f"max by (instance, source) (cuzk_clock_anchor_uncertainty_seconds{{{LOG}}})",
                    properties=[*unit_of("s"), least_width(100)],
                ),
                Column(
                    "last event",
                    f"max by (instance, source) (cuzk_timeline_last_event_timestamp_seconds{{{LOG}}}) * 1000",
                    properties=[*unit_of("dateTimeFromNow"), least_width(140)],
                ),
            ],
        ),
        widths=(24,),
    )
    board.row("What it costs")
    board.line(
        8,
        graph(
            "CPU of the agent",
            "Cores. Some hundredths are normal; a tenth and more while the daemon is quiet is worth a report.",
            Query(f"rate(process_cpu_seconds_total{{{HOST}}}[{NOW}]) {OURS}", "{{instance}}"),
            unit="suffix:cores",
        ),
        graph(
            "Memory of the agent",
            "Resident. It is flat whatever the log does; if it climbs for days, restart the agent and report it.",
            Query(f"process_resident_memory_bytes{{{HOST}}} {OURS}", "{{instance}}"),
            unit="bytes",
        ),
        graph(
            "Scrape",
            "How long Prometheus takes for a page. Near the scrape's timeout: fewer sources for one agent, or a "
            "longer timeout.",
            Query(f"scrape_duration_seconds{{{HOST}}} {OURS}", "{{instance}}"),
            unit="s",
        ),
    )
    board.line(
        8,
        graph(
            "Time in NVML by call",
            "The share of a core that the sampler spends in the driver's dearest calls, all agents together; without "
            "an NVIDIA driver it may be empty. If it rises by itself, the driver is in trouble; PCIe throughput is "
            "dear, and can be turned off.",
            Query(f"topk(3, {_short(NVML_TIME)})", "{{call}}"),
            unit="percentunit",
            stacked=True,
        ),
        graph(
            "Errors of NVML",
            "Calls that failed; while none does it may be empty. What is not supported is asked once in a while and "
            "counts too; GpuIsLost and Unknown are trouble.",
            Query(
                f"{_short(NVML_ERRORS)} > 0",
                "{{call}}: {{error}}",
            ),
            unit="none",
            empty="no errors",
            bars=True,
            stacked=True,
            shades=WARN,
        ),
        graph(
            "Errors of the agent",
            "Groups of metrics that could not be shown, and writes of its state that failed; while nothing fails it "
            "may be empty. The first is a fault of the agent: its own log has the details, and a report with them is "
            "welcome. The second is mostly a full disk, or a directory that the agent may not write.",
            Query(
                f"round(sum by (collector) (increase(cuzk_agent_collector_errors_total{{{HOST}}}[{NOW}]))) > 0",
                "{{collector}} not shown",
            ),
            Query(f"round(sum(increase(cuzk_agent_state_write_errors_total{{{HOST}}}[{NOW}])))", "state not written"),
            unit="none",
            empty="no errors",
            shades=BAD,
            colours={"state not written": WARN},
            bars=True,
            stacked=True,
        ),
    )
    return board
