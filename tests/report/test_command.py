"""`analyze` and `compare` as a user runs them: what they print, and how they end."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from cuzk_agent.cli import Exit, main

DATA = Path(__file__).parent.parent / "data"
GOLDEN = Path(__file__).parent / "golden"
P9, ISOLATED = str(DATA / "seeds/p9-c15.log.xz"), str(DATA / "seeds/isolated3.log")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal of whoever runs the tests is like."""
    monkeypatch.delenv("COLUMNS", raising=False)


def check(name: str, shown: str, request: pytest.FixtureRequest) -> None:
    """Compares with the golden file; `--update` writes it instead."""
    path = GOLDEN / name
    if request.config.getoption("--update"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("isolated3.txt", ["analyze", "--jobs", "--gaps", "10ms", "seeds/isolated3.log"]),
        ("p9-c15.txt", ["analyze", "--jobs", "--gaps", "800ms", "seeds/p9-c15.log.xz"]),
        ("failing.txt", ["analyze", "--jobs", "daemon/failing.log.xz"]),
        ("crash.txt", ["analyze", "daemon/crash.log.xz"]),
        ("two-gpus-mixed.txt", ["analyze", "--jobs", "--gaps", "50ms", "daemon/two-gpus-mixed.log.xz"]),
        ("two-gpus.txt", ["analyze", "h200/two-gpus.log.xz"]),
        ("starved-gw1.txt", ["analyze", "h200/starved-gw1.log.xz"]),
        (
            "two-gpus-nvml.txt",
            [
                "analyze",
                "--nvml",
                "h200/two-gpus.gpu0.nvml.jsonl.xz",
                "--nvml",
                "1=h200/two-gpus.gpu1.nvml.jsonl.xz",
                "h200/two-gpus.log.xz",
            ],
        ),
        ("p9-c15-stretch.txt", ["analyze", "--from", "2m", "--to", "0:05:00.000", "seeds/p9-c15.log.xz"]),
        ("compare.txt", ["compare", "daemon/two-gpus-mixed.log.xz", "daemon/nocolour.log.xz"]),
        ("compare-few.txt", ["compare", "seeds/p9-c15.log.xz", "seeds/isolated3.log"]),
        ("gpus.csv", ["analyze", "--csv", "daemon/crash.log.xz"]),
        ("jobs.csv", ["analyze", "--csv", "--jobs", "seeds/isolated3.log"]),
        ("gaps.csv", ["analyze", "--csv", "--gaps", "800ms", "seeds/p9-c15.log.xz"]),
    ],
)
def test_what_is_printed(
    name: str,
    arguments: list[str],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(DATA)
    assert main(arguments) == Exit.STOPPED
    captured = capsys.readouterr()
    assert captured.err == ""
    check(name, captured.out, request)
    if name.endswith(".txt"):
        assert max(map(len, captured.out.splitlines())) <= 80


def test_the_csv_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyze", "--csv", "--jobs", str(DATA / "daemon/two-gpus-mixed.log.xz")])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 16
    assert {row["proof_kind"] for row in rows} == {"porep-c2", "snap-update", "window-post", "winning-post"}
    assert any(" " in row["job_id"] for row in rows)


# --- inputs


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("parts", [1, 3])
def test_compressed_logs(kind: str, parts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(ISOLATED).read_bytes()
    size = -(-len(data) // parts)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    # By what it holds, not by its name; and in several members or frames, as tools that append make them.
    (tmp_path / "log").write_bytes(b"".join(PACKED[kind](piece) for piece in pieces))
    assert main(["analyze", "--json", str(tmp_path / "log")]) == Exit.STOPPED
    assert json.loads(capsys.readouterr().out)["engines"][0]["gpus"]["unknown"]["busy_ms"] == 88437


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2", "zst"])
def test_a_log_that_was_cut_off_is_reported_as_far_as_it_goes(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lzma.decompress(Path(P9).read_bytes())
    (tmp_path / "log").write_bytes(PACKED[kind](data)[:-200])
    assert main(["analyze", str(tmp_path / "log")]) == Exit.NO_DATA
    captured = capsys.readouterr()
    assert f"{tmp_path}/log: cannot be read on: " in captured.err
    if kind == "gz":
        assert "Bound by synthesis" in captured.out


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "cuzk_agent", *arguments], input=stdin, capture_output=True, check=False
    )


@pytest.mark.parametrize("kind", PACKED)
def test_standard_input(kind: str) -> None:
    ran = run("analyze", "--json", "-", stdin=PACKED[kind](Path(ISOLATED).read_bytes()))
    assert (ran.returncode, ran.stderr) == (Exit.STOPPED, b"")
    assert json.loads(ran.stdout)["engines"][0]["throughput"]["proofs"] == 3


def test_rotated_parts_in_any_order_and_by_glob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lzma.decompress((DATA / "daemon/two-gpus-mixed.log.xz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "log.2.gz").write_bytes(gzip.compress(b"".join(lines[:700])))
    (tmp_path / "log.1").write_bytes(b"".join(lines[700:1500]))
    (tmp_path / "log").write_bytes(b"".join(lines[1500:]))
    reports = []
    for arguments in (["log", "log.1", "log.2.gz"], ["log.1", "log.2.gz", "log"], ["log*"]):
        assert main(["analyze", "--json", *(str(tmp_path / name) for name in arguments)]) == Exit.STOPPED
        reports.append(json.loads(capsys.readouterr().out)["engines"])
    main(["analyze", "--json", str(DATA / "daemon/two-gpus-mixed.log.xz")])
    assert reports == [json.loads(capsys.readouterr().out)["engines"]] * 3


def test_rotated_parts_without_time_stamps_go_by_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Path(ISOLATED).read_bytes().splitlines(keepends=True)
    for number in range(12):
        name = f"log.{11 - number}" if number < 11 else "log"
        (tmp_path / name).write_bytes(b"".join(lines[number : None if number == 11 else number + 1]))
    main(["analyze", "--json", str(tmp_path / "log*")])
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["gpus"]["unknown"]["busy_ms"] == 88437


# --- what cannot be reported

NO_SPANS = b"""\
TIMELINE,1,SYNTH_START,a,partition=0
TIMELINE,900,SYNTH_END,a,partition=0,synth_ms=899
TIMELINE,901,GPU_PICKUP,a,worker=0,partition=0
2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: partition GPU prove complete job_id=a partition=0 gpu_ms=9 filled=1
"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "log: empty"),
        (b"hello\nworld\n", "log: no TIMELINE line in 2 lines; is this the log of a cuzk daemon?"),
        (bytes(range(256)) * 40, "log: no TIMELINE line in it; this looks like binary data"),
        (
            b"Nov 30 14:00:00 prover-1 cuzk[4711]: TIMELINE,1,SYNTH_START,a,partition=0\n",
            "log: no line begins with TIMELINE, some have it after a prefix; of a journal, take `journalctl -o cat`",
        ),
        (
            b"2026-11-30T14:00:00+0000 prover-1 cuzk: TIMELINE,1,SYNTH_START,a,partition=0\n",
            "log: no line begins with TIMELINE, some have it after a prefix; of a journal, take `journalctl -o cat`",
        ),
        (b"\0" * 5000, "log: no TIMELINE line in 0 lines; is this the log of a cuzk daemon?"),
        (
            b"2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=false\n",
            "log: no TIMELINE line in it; with pipeline_enabled=false the daemon writes none",
        ),
        (b"TIMELINE,1,SYNTH_START,a,partition=0\n", "log: no proving on a GPU in it"),
        (
            NO_SPANS,
            "log: this daemon writes no GPU_START and GPU_END (CUZK_DISABLE_SPLIT_PROVE=1)",
        ),
    ],
)
def test_nothing_to_report(data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_bytes(data)
    assert main(["analyze", str(tmp_path / "log")]) == Exit.NO_DATA
    captured = capsys.readouterr()
    assert captured.err == f"cuzk-agent: {tmp_path}/{message}\n"
    assert main(["analyze", "--json", str(tmp_path / "log")]) == Exit.NO_DATA
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert main(["compare", ISOLATED, str(tmp_path / "log")]) == Exit.NO_DATA
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"cuzk-agent: {tmp_path}/{message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "/no/log"], "/no/log: no such file"),
        (["analyze", "/no/log*"], "/no/log*: no such file"),
        (["analyze", "/"], "/: Is a directory"),
        (["analyze", "--nvml", "/no", ISOLATED], "/no: No such file or directory"),
        (["analyze", "--nvml", f"1={ISOLATED}", ISOLATED], f"{ISOLATED}: no NVML samples in it"),
        (["analyze", "-", "-"], "standard input (-) can be given once only"),
        (["compare", ISOLATED, "/no/\x1b[2Jlog"], "/no/\\x1b[2Jlog: no such file"),
        (["analyze", "--from", "2h", ISOLATED], f"{ISOLATED}: nothing in this stretch"),
        (
            ["analyze", "--from", "2026-11-30", ISOLATED],
            f"{ISOLATED}: nothing in this stretch, or the log tells no time: try times since the engine's start",
        ),
    ],
)
def test_what_cannot_be_read(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == Exit.NO_DATA
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"cuzk-agent: {message}\n")


# --- hostile logs and terminals


def test_nothing_of_a_log_reaches_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = "\x9b2J\u202e\u2028x" * 30
    lines = [
        "2026-11-30T14:00:00.000000Z  INFO a::b: starting cuzk engine pipeline_enabled=\x07\x9b31m",
        f"TIMELINE,1000,SYNTH_START,{job},kind=porep-c2",
        f"TIMELINE,2000,SYNTH_END,{job},synth_ms=1000",
        f"TIMELINE,2000,GPU_PICKUP,{job},worker=0",
        f"TIMELINE,2000,GPU_START,{job},worker=0",
        f"TIMELINE,3000,GPU_END,{job},worker=0,gpu_ms=1000",
        "TIMELINE,4000,GPU_START,=1+1,worker=0",
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    assert main(["analyze", "--jobs", "--gaps", "1ms", str(tmp_path / "log")]) == Exit.STOPPED
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert "\\x9b2J\\u202e" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80


def shown_on_a_terminal(*arguments: str, **environment: str) -> str:
    """What the program writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "cuzk_agent", *arguments], stdout=theirs, env={**os.environ, **environment}
    ):
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return shown.decode()


def log_of(jobs: list[str]) -> str:
    """One span each, with gaps between them."""
    return "".join(
        f"TIMELINE,{at},SYNTH_START,{job},kind=porep-c2\nTIMELINE,{at + 100},SYNTH_END,{job},synth_ms=100\n"
        f"TIMELINE,{at + 100},GPU_PICKUP,{job},worker=0\nTIMELINE,{at + 100},GPU_START,{job},worker=0\n"
        f"TIMELINE,{at + 900},GPU_END,{job},worker=0,gpu_ms=800\n"
        for at, job in zip(range(1000, 100_000, 1000), jobs, strict=False)
    )


def told(shown: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The ids in the table of jobs, and those before and after each gap."""
    _, _, tables = shown.partition("Jobs (")
    jobs, _, gaps = tables.partition("\nGaps of")
    pairs = [line.split()[-2:] for line in gaps.splitlines()[2:]]
    return [line.split()[0] for line in jobs.splitlines()[2:] if line], [(before, after) for before, after in pairs]


LONG = "porep-1000-2026-11-30-sealing-20"


@pytest.mark.parametrize(
    ("jobs", "width", "first"),
    [
        ([f"porep-1000-{number}" for number in range(20041, 20061)], 80, ("porep-1000-20041", "porep-100…041")),
        ([f"{LONG}{number}" for number in range(100, 120)], 80, ("porep-1000-2026-11…-20100", "porep-100…100")),
        ([f"{LONG}{number}" for number in range(100, 120)], 200, (f"{LONG}100", f"{LONG}100")),
        # Neither their beginning nor their end tells them apart: it is the line that has to be longer.
        ([f"{LONG}{number}-{'0' * 20}" for number in range(100, 120)], 80, None),
    ],
)
def test_no_two_jobs_look_the_same(
    jobs: list[str],
    width: int,
    first: tuple[str, str] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "log").write_text(log_of(jobs))
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["analyze", "--jobs", "--gaps", "1ms", str(tmp_path / "log")]) == Exit.STOPPED
    shown = capsys.readouterr().out
    names, gaps = told(shown)
    assert len(set(names)) == len(jobs)
    assert len({before for before, _ in gaps} | {gaps[-1][1]}) == len(jobs)
    assert all(after == before for (_, after), (before, _) in itertools.pairwise(gaps))
    if first is not None:
        assert (names[0], gaps[0][0]) == first
        assert max(map(len, shown.splitlines()[1:])) <= width


def test_sentences_are_no_wider_than_one_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["analyze", P9]) == Exit.STOPPED
    assert 100 < max(map(len, capsys.readouterr().out.splitlines())) <= 120


def test_colour_is_for_terminals_that_want_it() -> None:
    assert "\x1b[1mGPUs\x1b[0m" in shown_on_a_terminal("analyze", ISOLATED, TERM="xterm", NO_COLOR="")
    assert "\x1b" not in shown_on_a_terminal("analyze", ISOLATED, TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in shown_on_a_terminal("analyze", ISOLATED, TERM="dumb", NO_COLOR="")


def test_a_reader_that_has_seen_enough() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cuzk_agent", "analyze", "--json", P9], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == Exit.STOPPED


# --- conditions


@pytest.mark.parametrize(
    ("condition", "status", "message"),
    [
        ("logged_utilization<0.9", Exit.STOPPED, ""),
        ("logged_utilization<=90.2%", Exit.CONDITION, "logged_utilization<=90.2% holds"),
        (
            "logged_utilization<0.5 or starved_share > 5%",
            Exit.CONDITION,
            "logged_utilization<0.5 or starved_share > 5% holds",
        ),
        ("logged_utilization>0.5 and starved_share<1%", Exit.STOPPED, ""),
        ("base.proof_mean_s>70 and change.proof_mean_s>=0", Exit.CONDITION, None),
        ("change.proof_mean_s>0", Exit.STOPPED, ""),
        (
            "span_occupancy<0.9",
            Exit.CONDITION,
            "span_occupancy<0.9 cannot be told: the log says nothing about span_occupancy",
        ),
        ("span_occupancy<0.9 and gap_max_s>10", Exit.CONDITION, None),
        ("span_occupancy<0.9 or gap_max_s>1", Exit.CONDITION, "span_occupancy<0.9 or gap_max_s>1 holds"),
    ],
)
def test_conditions(condition: str, status: Exit, message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", P9, P9, "--fail-if", condition]) == status
    captured = capsys.readouterr()
    if message is not None:
        assert captured.err == (f"cuzk-agent: {P9}: {message}\n" if message else "")
    assert "logged_utilization" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["compare", P9, P9, "--fail-if", ""],
            "expected comparisons such as logged_utilization<0.9, joined by and, or",
        ),
        (["compare", P9, P9, "--fail-if", "logged_utilization"], "expected comparisons such as"),
        (["compare", P9, P9, "--fail-if", "__import__('os')<1"], "expected comparisons such as"),
        (["compare", P9, P9, "--fail-if", "speed<1"], "expected a figure out of logged_utilization, "),
        (["compare", P9, P9, "--fail-if", "base.base.proof_mean_s<1"], "expected a figure out of "),
        (["compare", P9], "the following arguments are required: NEW"),
        (["analyze"], "the following arguments are required: LOG"),
        (
            ["analyze", "--gaps", "long", P9],
            "argument --gaps: 'long': expected a duration such as 800ms, 1.5s or 1h30m",
        ),
        (
            ["analyze", "--from", "noon", P9],
            "argument --from: 'noon': expected a time since the engine's start such as",
        ),
        (["analyze", "--json", "--csv", P9], "not allowed with argument"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "end"), [("300s", "100s"), ("0:05:00", "299s"), ("2026-11-30T14:00", "2026-11-30T15:59+02:00")]
)
def test_a_stretch_that_ends_before_it_begins(start: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--from", start, "--to", end, P9]) == Exit.USAGE
    expected = "cuzk-agent: --to: the stretch ends before it begins; expected a time after that of --from\n"
    assert capsys.readouterr() == ("", expected)


def test_two_recordings_of_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--nvml", "a", "--nvml", "0=b", ISOLATED]) == Exit.USAGE
    assert capsys.readouterr().err == "cuzk-agent: --nvml: two files for one GPU; name it, as in 1=FILE\n"


def test_compare_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    mixed, plain = (str(DATA / f"daemon/{name}.log.xz") for name in ("two-gpus-mixed", "nocolour"))
    assert main(["compare", "--json", mixed, plain, mixed]) == Exit.STOPPED
    found = json.loads(capsys.readouterr().out)
    assert found["base"] == [mixed]
    other, same = found["new"]
    assert other["settings"]["num_gpus"] == {"base": "2", "new": "1"}
    assert other["figures"]["logged_utilization"]["chance"] == "real"
    assert other["figures"]["logged_utilization"]["better"] is True
    low, high = other["figures"]["logged_utilization"]["interval"]
    assert 0 < low < 0.15 < high
    assert same["figures"]["proof_mean_s"]["change"] == 0
    assert {figure["chance"] for figure in same["figures"].values()} == {"noise", "not_told"}


def row_of(shown: str, figure: str) -> str:
    (row,) = (line for line in shown.splitlines() if line.startswith(f"  {figure} "))
    return " ".join(row.split())


def test_a_change_and_its_range_are_in_the_same_unit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *(str(DATA / f"daemon/{name}.log.xz") for name in ("two-gpus-mixed", "nocolour"))]
    main(arguments)
    shown = capsys.readouterr().out
    main([*arguments, "--json"])
    figures = json.loads(capsys.readouterr().out)["new"][0]["figures"]
    for name in ("logged_utilization", "proof_mean_s", "gpu_seconds_per_proof"):
        low, high = (end / figures[name]["base"] for end in figures[name]["interval"])
        assert low < figures[name]["change"] < high
        assert f" {figures[name]['change']:+.1%} {low:+.1%} to {high:+.1%} " in row_of(shown, name)


def test_how_often_nothing_goes_into_nothing_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of([f"porep-{number}" for number in range(20)])
    base, new = tmp_path / "base", tmp_path / "new"
    once = log.replace("TIMELINE,2100,GPU_START", "TIMELINE,2101,GPU_START")
    base.write_text(once)
    new.write_text(once.replace("TIMELINE,3100,GPU_START", "TIMELINE,3102,GPU_START"))
    # A condition on it is none the less told.
    assert main(["compare", str(base), str(new), "--fail-if", "change.handoff_mean_s>100%"]) == Exit.CONDITION
    assert row_of(capsys.readouterr().out, "handoff_mean_s") == "handoff_mean_s 0 ms 0 ms – –"


def test_an_interrupted_report_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cuzk_agent.report.command.analyze", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["analyze", ISOLATED])
    assert ended.value.code == 130
    assert capsys.readouterr().out == ""
