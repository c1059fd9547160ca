"""Each alert fires when it should, and none does when nothing is wrong: on recorded scrapes, under promtool."""

from __future__ import annotations

import json
import lzma
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cuzk_agent.demo.scenario import (
    BOUND,
    HANDOFF,
    IDLE,
    POREP,
    POSTDEADLINE,
    SNAP,
    STARVED,
    TRICKLE,
    WINDOW,
    WINNING,
    Burst,
    End,
    Fault,
    Foreign,
    Generation,
    Life,
    Priority,
    Request,
    Scenario,
    Setting,
)
from cuzk_agent.snapshot import Keeping
from deploy.recorder import Recorder, input_series

ROOT = Path(__file__).parent.parent.parent
RULES = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
NAMES = {name for file in RULES for name in re.findall(r"\bcuzk_\w+", file.read_text(encoding="utf-8"))}
MINUTE_S = 60.0
HOUR_S = 3600.0

Story = Callable[[Recorder], None]
"""What happens while the agent is scraped."""


# --- what happens -----------------------------------------------------------------------------------------------


def prover(setting: Setting, *requests: Request, pause_s: float = 5) -> Scenario:
    """These requests over and over, with a pause between."""
    return Scenario("", setting, (Burst(pause_s * 1000, requests),))


CALM = replace(BOUND.setting, dispatchers=4)
"""A GPU that nobody else uses, and a CPU that keeps up with it."""
WELL = prover(
    CALM,
    Request(0, POREP),
    Request(1_000, POREP),
    Request(2_000, SNAP),
    Request(90_000, WINNING, priority=Priority.CRITICAL),
    Request(100_000, WINDOW, priority=Priority.HIGH),
    pause_s=20,
)
IN_A_POST = prover(CALM, Request(60_000, replace(WINDOW, synth_ms=480_000), priority=Priority.HIGH))
"""It is at work on one from the second minute to the tenth."""


def has_no_work(recorder: Recorder) -> None:
    recorder.play(replace(IDLE, setting=CALM), 40 * MINUTE_S, chips=True)


def proves_one_at_a_time(recorder: Recorder) -> None:
    recorder.play(TRICKLE, 40 * MINUTE_S, chips=True)


def works_well(recorder: Recorder) -> None:
    recorder.play(WELL, 45 * MINUTE_S, chips=True)


def is_bound_by_its_gpu(recorder: Recorder) -> None:
    recorder.play(BOUND, 30 * MINUTE_S, chips=True)


def has_its_agent_restarted(recorder: Recorder) -> None:
    def restart() -> None:
        if recorder.now_s in {10 * MINUTE_S, 25 * MINUTE_S}:
            recorder.stop_agent()
        if recorder.now_s in {11 * MINUTE_S, 28 * MINUTE_S}:
            recorder.start_agent()

    recorder.at_step = restart
    recorder.play(replace(WELL, setting=replace(CALM, gpus=2)), 45 * MINUTE_S, chips=True)


def is_restarted(recorder: Recorder) -> None:
    killed = Life(20 * MINUTE_S * 1000, End.KILLED, MINUTE_S * 1000)
    recorder.play(replace(WELL, lives=(killed,)), 35 * MINUTE_S)
    recorder.wait(MINUTE_S)
    recorder.play(WELL, 20 * MINUTE_S)


def is_not_scraped_for_a_while(recorder: Recorder) -> None:
    def interrupt() -> None:
        recorder.scraping = not 15 * MINUTE_S < recorder.now_s < 30 * MINUTE_S
        recorder.reachable = not 40 * MINUTE_S < recorder.now_s < 48 * MINUTE_S

    recorder.at_step = interrupt
    recorder.play(WELL, HOUR_S, chips=True)


def was_captured_at_work(recorder: Recorder) -> None:
    recorder.start_agent()
    recorder.replay(captured("seeds/p9-c15"))
    recorder.wait(5 * MINUTE_S)


def captured(name: str) -> Iterator[tuple[float, bytes]]:
    """Lines of a capture, each with the time at which it was written, as far as the TIMELINE lines tell."""
    at_s = 0.0
    for line in lzma.decompress((ROOT / "tests/data" / f"{name}.log.xz").read_bytes()).splitlines():
        if event := re.search(rb"TIMELINE,(\d+),", line):
            at_s = max(at_s, int(event[1]) / 1000)
        yield at_s, line


def hands_over_slowly(recorder: Recorder) -> None:
    slow = replace(HANDOFF.setting, slow_trim_probability=0.9, slow_trim_ms=3_000)
    recorder.play(replace(HANDOFF, setting=slow), 30 * MINUTE_S)


def is_blocked(recorder: Recorder) -> None:
    waiting = replace(CALM, max_batch=3, batch_wait_ms=300_000)
    recorder.play(prover(waiting, *(Request(i * 10_000, POREP) for i in range(4))), 30 * MINUTE_S)


def dies_at_work(recorder: Recorder) -> None:
    killed = Life(10 * MINUTE_S * 1000, End.KILLED, 10 * HOUR_S * 1000)
    recorder.play(replace(BOUND, lives=(killed,)), 40 * MINUTE_S)


def proves_posts_late(recorder: Recorder) -> None:
    slow = replace(WINDOW, synth_ms=180_000)
    requests = (Request(0, kind) for kind in (slow, slow, slow, slow, WINNING))
    recorder.play(prover(replace(CALM, dispatchers=1), *requests), 30 * MINUTE_S)


def fails(recorder: Recorder) -> None:
    faults = (Fault.PROVE_START, Fault.SELF_CHECK, Fault.SYNTHESIS)
    requests = (Request(i * 10_000, POREP, fault) for i, fault in enumerate((None, *faults)))
    window = Request(0, WINDOW, Fault.PROVE_START, Priority.HIGH)
    recorder.play(prover(CALM, *requests, window, pause_s=60), 40 * MINUTE_S, chips=True)


def was_captured_failing(recorder: Recorder) -> None:
    recorder.start_agent()
    recorder.wait(5 * MINUTE_S)
    recorder.replay((5 * MINUTE_S + at_s, line) for at_s, line in captured("daemon/failing"))
    recorder.wait(10 * MINUTE_S)


def holds_its_gpu_for_long(recorder: Recorder) -> None:
    recorder.play(prover(CALM, Request(0, replace(WINDOW, gpu_scale=95))), 15 * MINUTE_S)


def loses_proofs(recorder: Recorder) -> None:
    recorder.play(POSTDEADLINE, 30 * MINUTE_S)


def loses_a_gpu(recorder: Recorder) -> None:
    def lose() -> None:
        if recorder.now_s == 10 * MINUTE_S:
            recorder.nvml.remove(1)

    recorder.at_step = lose
    recorder.play(replace(WELL, setting=replace(CALM, gpus=2)), 15 * MINUTE_S, chips=True)


def loses_a_gpu_and_has_its_agent_restarted(recorder: Recorder) -> None:
    def lose() -> None:
        if recorder.now_s == 10 * MINUTE_S:
            recorder.stop_agent()
            recorder.nvml.remove(1)
        if recorder.now_s == 11 * MINUTE_S:
            recorder.start_agent()

    recorder.at_step = lose
    recorder.play(replace(WELL, setting=replace(CALM, gpus=2)), 20 * MINUTE_S, chips=True)


def has_an_xid(recorder: Recorder) -> None:
    def report() -> None:
        if recorder.now_s == 10 * MINUTE_S:
            recorder.nvml.xid(0, 48)

    recorder.at_step = report
    recorder.play(WELL, 15 * MINUTE_S, chips=True)


def restarts_over_and_over(recorder: Recorder) -> None:
    for _ in range(5):
        recorder.play(WELL, 3 * MINUTE_S)


def is_starved(recorder: Recorder) -> None:
    recorder.play(STARVED, HOUR_S)


def has_low_occupancy(recorder: Recorder) -> None:
    slow = replace(CALM, generation=Generation.SINGLE, workers_per_gpu=1, pre_lock_ms=6_000)
    recorder.play(prover(slow, *[Request(0, POREP)] * 4), 40 * MINUTE_S, chips=True)


def shares_its_gpu(recorder: Recorder) -> None:
    shared = replace(CALM, foreign=Foreign(0, 400_000, 60_000, 0.6))
    recorder.play(replace(IDLE, setting=shared), 40 * MINUTE_S, chips=True)


def is_short_of_memory(recorder: Recorder) -> None:
    bursts = tuple(Burst(100_000, (Request(0, kind),)) for kind in (SNAP, WINDOW))
    recorder.play(Scenario("", replace(CALM, budget_gib=100), bursts), HOUR_S)


def gets_hot(recorder: Recorder) -> None:
    def heat() -> None:
        recorder.nvml.gpus[0].throttle_reasons = 0x40 if recorder.now_s % 20 < 4 else 0

    recorder.at_step = heat
    recorder.play(WELL, 30 * MINUTE_S, chips=True)


def has_no_samples_at_times(recorder: Recorder) -> None:
    def fail() -> None:
        recorder.nvml.heal()
        if recorder.now_s % 300 < 100:
            recorder.nvml.fail("nvmlDeviceGetSamples", error="Unknown", gpu=0)
            recorder.nvml.fail("nvmlDeviceGetUtilizationRates", error="Unknown", gpu=0)

    recorder.at_step = fail
    recorder.play(WELL, 40 * MINUTE_S, chips=True)


def has_no_agent(recorder: Recorder) -> None:
    recorder.start_agent()
    recorder.wait(5 * MINUTE_S)
    recorder.stop_agent()
    recorder.wait(15 * MINUTE_S)


def dies_with_its_machine_in_a_post(recorder: Recorder) -> None:
    recorder.play(IN_A_POST, 5 * MINUTE_S)
    recorder.reachable = False
    recorder.wait(15 * MINUTE_S)


def has_its_agent_restarted_in_a_post(recorder: Recorder) -> None:
    def restart() -> None:
        if recorder.now_s == 5 * MINUTE_S:
            recorder.stop_agent()
        if recorder.now_s == 7.5 * MINUTE_S:
            recorder.start_agent()

    recorder.at_step = restart
    recorder.play(IN_A_POST, 9 * MINUTE_S)


def is_scraped_under_another_name(recorder: Recorder) -> None:
    recorder.job = "cuzk-agent"
    recorder.start_agent()
    recorder.wait(30 * MINUTE_S)


def chatters(recorder: Recorder, minutes: float, message: str = "cuzk_server::service: status asked for") -> None:
    """The log gets a line every ten seconds, and nothing happens."""
    for _ in range(int(minutes * 6)):
        write(recorder, message)
        recorder.wait(10)


def write(recorder: Recorder, message: str) -> None:
    time = datetime.fromtimestamp(recorder.clock.unix_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    with recorder.log.open("a", encoding="utf-8") as log:
        log.write(f"{time}  INFO {message}\n")


def is_not_what_is_followed(recorder: Recorder) -> None:
    recorder.start_agent()
    chatters(recorder, 60, "web::server: GET /")


def is_shut_down_and_lives_on(recorder: Recorder) -> None:
    recorder.play(WELL, 10 * MINUTE_S)
    chatters(recorder, 110)


def does_not_get_through_its_start(recorder: Recorder) -> None:
    recorder.start_agent()
    chatters(recorder, 60, "cuzk_daemon: cuzk-daemon starting")


def has_a_wordy_log_and_no_work(recorder: Recorder) -> None:
    def chat() -> None:
        if recorder.now_s % 10 == 0:
            write(recorder, "cuzk_server::service: status asked for")
        if recorder.now_s == 50 * MINUTE_S:
            recorder.stop_agent()
            recorder.start_agent()

    recorder.at_step = chat
    recorder.play(replace(IDLE, setting=CALM), 100 * MINUTE_S)


def was_shut_down_for_long(recorder: Recorder) -> None:
    recorder.play(WELL, 10 * MINUTE_S)
    recorder.wait(100 * MINUTE_S)
    chatters(recorder, 25)
    recorder.play(WELL, 30 * MINUTE_S)


def has_no_log(recorder: Recorder) -> None:
    recorder.start_agent()
    recorder.wait(5 * MINUTE_S)
    recorder.log.unlink()
    recorder.log.mkdir()
    recorder.wait(10 * MINUTE_S)


def has_an_agent_that_cannot_write_its_state(recorder: Recorder) -> None:
    def fail() -> None:
        assert recorder.agent
        recorder.agent.keeping = Keeping(errors=int(max(0, recorder.now_s - 10 * MINUTE_S) / 5))

    recorder.at_step = fail
    recorder.play(WELL, 20 * MINUTE_S)


def has_an_agent_that_failed_to_write_its_state_once(recorder: Recorder) -> None:
    def fail() -> None:
        assert recorder.agent
        recorder.agent.keeping = Keeping(errors=int(recorder.now_s > 10 * MINUTE_S))

    recorder.at_step = fail
    recorder.play(WELL, 20 * MINUTE_S)


def has_an_agent_that_shows_a_part_only(recorder: Recorder) -> None:
    def fail() -> None:
        assert recorder.agent
        recorder.agent.broken = {"chips", "gpus"} if recorder.now_s > 10 * MINUTE_S else set()

    recorder.at_step = fail
    recorder.play(WELL, 20 * MINUTE_S, chips=True)


def has_a_damaged_log(recorder: Recorder) -> None:
    lines = captured("seeds/p9-c15")
    recorder.start_agent()
    recorder.replay((at_s, line[:12] if n % 50 == 0 else line) for n, (at_s, line) in enumerate(lines))
    recorder.wait(15 * MINUTE_S)


def has_a_journal_that_drops_lines(recorder: Recorder) -> None:
    recorder.start_agent()
    assert recorder.agent
    recorder.wait(5 * MINUTE_S)
    recorder.agent.dropped_lines = 700
    recorder.wait(5 * MINUTE_S)


QUIET: tuple[Story, ...] = (
    has_no_work,
    proves_one_at_a_time,
    works_well,
    is_bound_by_its_gpu,
    has_its_agent_restarted,
    is_restarted,
    is_not_scraped_for_a_while,
    was_captured_at_work,
    has_an_agent_that_failed_to_write_its_state_once,
    has_its_agent_restarted_in_a_post,
    has_a_wordy_log_and_no_work,
    was_shut_down_for_long,
)

LOUD: dict[Story, set[str]] = {
    hands_over_slowly: {"CuzkGpuHandoffSlow"},
    is_blocked: {"CuzkGpuBlocked"},
    dies_at_work: {"CuzkProverStalled", "CuzkUnitStuck", "CuzkUnitsLost"},
    proves_posts_late: {"CuzkWinningPostLate", "CuzkWindowPostLate"},
    fails: {
        "CuzkPostFailed",
        "CuzkProofsFailing",
        "CuzkGpuBadPartitions",
        "CuzkGpuXid",
        "CuzkWorkWasted",
        "CuzkMemoryTrouble",
    },
    was_captured_failing: {"CuzkProofsFailing"},
    holds_its_gpu_for_long: {"CuzkUnitStuck"},
    loses_proofs: {"CuzkUnitsLost"},
    loses_a_gpu: {"CuzkGpuLost"},
    loses_a_gpu_and_has_its_agent_restarted: {"CuzkGpuLost"},
    has_an_xid: {"CuzkGpuXid"},
    restarts_over_and_over: {"CuzkEngineRestartLoop"},
    is_starved: {"CuzkGpuStarved"},
    has_low_occupancy: {"CuzkSpanOccupancyLow"},
    shares_its_gpu: {"CuzkGpuUnloggedBusy"},
    is_short_of_memory: {"CuzkMemoryTrouble"},
    gets_hot: {"CuzkGpuThrottled"},
    has_no_samples_at_times: {"CuzkCoverageLow"},
    has_no_agent: {"CuzkAgentDown"},
    dies_with_its_machine_in_a_post: {"CuzkPostUnwatched", "CuzkAgentDown"},
    is_scraped_under_another_name: {"CuzkNoTargets"},
    is_not_what_is_followed: {"CuzkNoEngine"},
    is_shut_down_and_lives_on: {"CuzkNoEngine"},
    does_not_get_through_its_start: {"CuzkNoEngine"},
    has_no_log: {"CuzkSourceDown"},
    has_an_agent_that_cannot_write_its_state: {"CuzkAgentFaulty"},
    has_an_agent_that_shows_a_part_only: {"CuzkAgentFaulty"},
    has_a_journal_that_drops_lines: {"CuzkLinesLost"},
    has_a_damaged_log: {"CuzkLinesLost", "CuzkUnitStuck", "CuzkUnitsLost"},
}


# --- what fires -------------------------------------------------------------------------------------------------


def check(recorder: Recorder, expected: set[str], *, last_s: float | None = None, every_s: int = 30) -> None:
    """These alerts and no others fired in the course of a recording, or in its last seconds; what they say is whole."""
    end_s = (len(recorder.scrapes) - 1) * recorder.scrape_s
    begin_s = 0.0 if last_s is None else end_s - last_s
    fired = {
        "expr": f'group by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{end_s - begin_s:.0f}s]))',
        "eval_time": f"{end_s:.0f}s",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)],
    }
    # An alert that is said to be silent is quoted when it is not.
    times = range(int(begin_s), int(end_s) + 1, every_s)
    quoted = [{"alertname": name, "eval_time": f"{at_s}s", "exp_alerts": []} for name in expected for at_s in times]
    said = promtool(recorder, {"promql_expr_test": [fired], "alert_rule_test": quoted}, every_s)
    assert not re.findall(r"expr: .*\n.*exp:.*\n.*got:.*", said)
    texts = set(re.findall(r'Labels:\{alertname="(\w+)".*\}\s+Annotations:\{(.*)\}', said))
    assert {name for name, _ in texts} == expected
    for _, text in texts:
        found = re.fullmatch(r'description="(.*)", runbook_url="docs/runbooks/\w+\.md", summary="(.+)"', text)
        assert found, text
        assert re.search("[0-9]", found[1]), text
        assert not re.search(r"(?<!GPU )\b1 [a-z]+s\b", found[1]), text
        assert not re.search(r"no value|%!|NaN|Inf|<error|(^|[^.])  | $", found[1] + found[2]), text


def promtool(recorder: Recorder, test: dict[str, object], every_s: int) -> str:
    """What `promtool test rules` finds wrong with a test on a recording."""
    file = recorder.directory / "alerts.test.yml"
    tests = [{"interval": f"{recorder.scrape_s:.0f}s", "input_series": input_series(recorder.scrapes), **test}]
    content = {"rule_files": [str(rule) for rule in RULES], "evaluation_interval": f"{every_s}s", "tests": tests}
    # JSON is YAML.
    file.write_text(json.dumps(content), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or "FAILED" in said, said
    return "" if done.returncode == 0 else said


@pytest.mark.parametrize("story", QUIET, ids=lambda story: story.__name__)
def test_nothing_is_said_of_a_prover_that(story: Story, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, NAMES)
    story(recorder)
    check(recorder, set())


@pytest.mark.parametrize("story", LOUD, ids=lambda story: story.__name__)
def test_an_alert_fires_for_a_prover_that(story: Story, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, NAMES)
    story(recorder)
    check(recorder, LOUD[story])


@pytest.mark.timeout(180)
def test_a_prover_is_compared_with_its_own_last_day(tmp_path: Path) -> None:
    """One that is starved for life is not told of for ever, but when it gets worse."""
    recorder = Recorder(tmp_path, NAMES, scrape_s=300, step_s=20)
    small = prover(STARVED.setting, *[Request(0, POREP)] * 4, pause_s=600)
    recorder.play(small, 25.5 * HOUR_S)
    check(recorder, {"CuzkGpuStarved"}, every_s=300)
    check(recorder, set(), last_s=1200, every_s=300)
    slow = replace(POREP, synth_ms=2 * POREP.synth_ms)
    recorder.play(prover(STARVED.setting, *[Request(0, slow)] * 4, pause_s=600), 2 * HOUR_S)
    check(recorder, {"CuzkGpuStarved", "CuzkSynthesisSlow"}, last_s=HOUR_S, every_s=300)


def test_each_alert_has_its_story() -> None:
    """The comparison with the last day has a test of its own."""
    told = {name for names in LOUD.values() for name in names} | {"CuzkSynthesisSlow"}
    assert told == {name for file in RULES for name in re.findall(r"- alert: (\w+)", file.read_text(encoding="utf-8"))}
