"""Fleet: which prover loses most?"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from cuzk_dashboards.kit import (
    FAULTS,
    HOST,
    NOW,
    RANGE,
    UP_OR_DOWN,
    Board,
    Column,
    Query,
    below,
    coloured_text,
    earning,
    graph,
    grid,
    increase,
    instance_variable,
    least_width,
    link,
    mapped,
    neutral,
    none_is_good,
    number,
    one_each,
    rate,
    restarts,
    steps,
    unit_of,
    width,
)
from cuzk_dashboards.palette import BAD, BUSY, CAUSES, GOOD, QUIET, WARN

EACH = "instance, source"
SOURCES = f"max by ({EACH}) (last_over_time(cuzk_agent_source_up{{{HOST}}}[{RANGE}]))"
"""One series for each prover that was there in the range: also for one whose agent is down."""
FAULTY = f'{HOST}, cause=~"{FAULTS}"'
PROVED = f'{HOST}, outcome="proved"'
NOT_PROVED = f'{HOST}, outcome!="proved"'
FIRING = f'ALERTS{{{HOST}, alertstate="firing"}}'
SEVERITIES = (
    d.ValueMap(
        {"page": d.ValueMappingResult("page", BAD, index=0), "ticket": d.ValueMappingResult("ticket", WARN, index=1)}
    ),
)
PROVER = (
    "/d/cuzk-prover?var-datasource=${datasource}&var-instance=${__data.fields.instance}"
    "&var-source=${__data.fields.source}&${__url_time_range}"
)


def _lost(cause: str) -> Column:
    selector = f'{HOST}, cause="{cause}"'
    hours = f"{increase('cuzk_gpu_idle_seconds_total', selector, by=EACH)} / 3600"
    colours = steps((None, QUIET), (0.005, CAUSES[cause]))
    return Column(cause, hours, properties=[*unit_of("suffix:h", 2), *coloured_text(colours), width(82)])


def board() -> Board:
    """All provers, worst first."""
    board = Board(
        "cuzk-fleet",
        "cuzk / Fleet",
        "All provers, worst first: what they lost, what they proved, and what it took. A click on one leads to Prover.",
        [instance_variable()],
        restarts(HOST, HOST),
        since="now-24h",
    )
    board.row()
    board.line(
        4,
        number(
            "Provers",
            "Provers whose logs are being read now. If there are fewer than machines: the board Agent says which is "
            "down.",
            Query(f"sum(cuzk_agent_source_up{{{HOST}}})"),
            unit="none",
            decimals=0,
        ),
        number(
            "Earning",
            "The share of the time in which GPUs had a span open, of all in which they could have (without no_work "
            "and fill), over the range shown; without work it may be empty. The table says who pulls it down.",
            Query(earning(HOST, RANGE)),
            unit="percentunit",
            decimals=1,
            limits=below(0.7, 0.85),
            empty="no work",
        ),
        number(
            "Lost",
            "GPU-hours that were lost to starvation, blocking and hand-off in the range shown: what better settings "
            "would give back. Until the log names a GPU it may be empty.",
            Query(f"{increase('cuzk_gpu_idle_seconds_total', FAULTY)} / 3600"),
            unit="suffix:h",
            decimals=1,
        ),
        number(
            "Proofs/h",
            "Proofs that succeeded, an hour, on average of the range shown.",
            Query(f"{rate('cuzk_proof_outcomes_total', PROVED, RANGE)} * 3600"),
            unit="none",
            decimals=1,
        ),
        number(
            "Not proved",
            "Jobs that failed, were abandoned or lost, in the range shown. The table says where.",
            Query(f"round({increase('cuzk_proof_outcomes_total', NOT_PROVED)})"),
            unit="none",
            decimals=0,
            limits=none_is_good(),
        ),
        number(
            "Alerts",
            "Alerts about these provers that fire now, by Prometheus' own count; while none does it may be empty. "
            "They are listed at the bottom.",
            Query(f"count({FIRING})"),
            unit="none",
            decimals=0,
            limits=steps((None, GOOD), (1, BAD)),
            empty="none",
        ),
    )
    board.line(
        12,
        grid(
            "Provers, worst first",
            "One line for each prover: alerts that fire; GPU-hours lost to faults, and to each of them, in the range "
            "shown; how busy its GPUs were when they could be; proofs, and jobs that were not proved; energy for one "
            "proof; GPU-hours in which it could not have been busy, or nobody knows; whether its engine runs, and its "
            "agent answers. Begin with the first line: a click on it leads to the board Prover.",
            [
                Column("instance", properties=[*link("Prover", PROVER), least_width(90)]),
                Column("source", properties=[*link("Prover", PROVER), least_width(80)]),
                Column(
                    "alerts",
                    f"{SOURCES} * 0 + on (instance) group_left () count by (instance) ({FIRING})",
                    properties=[*unit_of("none", 0), *coloured_text(none_is_good()), width(65)],
                ),
                Column(
                    "lost",
                    f"{increase('cuzk_gpu_idle_seconds_total', FAULTY, by=EACH)} / 3600",
                    properties=[*unit_of("suffix:h", 2), width(75)],
                ),
                *(_lost(cause) for cause in CAUSES if cause in FAULTS.split("|")),
                Column(
                    "earning",
                    earning(HOST, RANGE, by=EACH),
                    properties=[*unit_of("percentunit", 1), *coloured_text(below(0.7, 0.85)), width(75)],
                ),
                Column(
                    "proofs",
                    f"round({increase('cuzk_proof_outcomes_total', PROVED, by=EACH)})",
                    properties=[*unit_of("none", 0), width(70)],
                ),
                Column(
                    "not proved",
                    f"round({increase('cuzk_proof_outcomes_total', NOT_PROVED, by=EACH)})",
                    properties=[*unit_of("none", 0), *coloured_text(none_is_good()), width(90)],
                ),
                Column(
                    "energy",
                    f"{increase('cuzk_proof_energy_joules_sum', HOST, by=EACH)} / "
                    f"({increase('cuzk_proof_energy_joules_count', HOST, by=EACH)} > 0)",
                    properties=[*unit_of("joule", 1), width(80)],
                ),
                *(_lost(cause) for cause in ("fill", "unknown")),
                Column(
                    "engine",
                    f"max by ({EACH}) (cuzk_engine_running{{{HOST}}})",
                    properties=[*mapped(UP_OR_DOWN), *coloured_text(neutral()), width(65)],
                ),
                Column(
                    "agent",
                    f"{SOURCES} * 0 + on (instance) group_left () max by (instance) (up{{{HOST}}})",
                    properties=[*mapped(UP_OR_DOWN), *coloured_text(neutral()), width(65)],
                ),
            ],
            sort="lost",
        ),
        widths=(24,),
    )
    board.row("Over time")
    board.line(
        9,
        graph(
            "Lost to faults by prover",
            "GPUs that were starved, blocked or waited for the hand-off. One that rises while the others do not has "
            "a fault of its own; all at once: something that they share. Until the log names a GPU it may be empty.",
            Query(f"sum by ({EACH}) (rate(cuzk_gpu_idle_seconds_total{{{FAULTY}}}[{NOW}]))", "{{instance}} {{source}}"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
        ),
        graph(
            "What the fleet's GPUs did",
            "How many GPUs were busy, and how many were idle for what cause. Grey is room for more work; orange, red "
            "and purple are room that you already pay for. Until the log names a GPU it may be empty.",
            Query(rate("cuzk_gpu_logged_busy_seconds_total", HOST), "busy"),
            *one_each("cause", CAUSES, f"sum(rate(cuzk_gpu_idle_seconds_total{{{HOST}, LABEL}}[{NOW}]))"),
            unit="suffix:GPUs",
            decimals=2,
            stacked=True,
            colours={**BUSY, **CAUSES},
        ),
    )
    board.line(
        9,
        graph(
            "Proofs in an hour, by prover",
            "Proofs that succeeded in the hour before. Compare machines of one kind; a fall here that is not one of "
            "demand is a regression.",
            Query(
                f"sum by ({EACH}) (increase(cuzk_proof_outcomes_total{{{PROVED}}}[1h]))",
                "{{instance}} {{source}}",
            ),
            unit="none",
        ),
        grid(
            "Alerts that fire",
            "What Prometheus holds against these provers now; while nothing fires it may be empty. Each alert links "
            "to its runbook in Alertmanager.",
            [
                Column("severity", properties=[*mapped(SEVERITIES), *coloured_text(neutral()), width(80)]),
                Column("alertname", properties=[least_width(190)]),
                Column("instance", properties=[least_width(90)]),
                Column("source", properties=[least_width(80)]),
                Column("gpu", properties=[width(55)]),
                Column(
                    "n",
                    f"count by (severity, alertname, instance, source, gpu) ({FIRING})",
                    hidden=True,
                ),
            ],
            empty="nothing fires",
        ),
    )
    return board
