"""The command line, from its arguments to its exit status."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from cuzk_agent.cli import Exit, LogFormatter, main, printable, set_up_logging
from cuzk_agent.config import Config, Listen, SourceConfig, load
from cuzk_agent.gpu.record import recording_paths
from cuzk_agent.server import ListenError

SetApp = Callable[..., None]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without settings of whoever runs the tests, and with the loggers as they were afterwards."""
    for name in ("CONFIG", "LISTEN", "LOG", "FROM", "LOG_LEVEL", "SILENCE_LIMIT", "ROLLING_WINDOW", "AGE_LIMIT"):
        monkeypatch.delenv(f"CUZK_AGENT_{name}", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def set_app(monkeypatch: pytest.MonkeyPatch) -> SetApp:
    """Puts functions in the place of the app's."""

    def set_app(**functions: object) -> None:
        app = types.ModuleType("cuzk_agent.app")
        vars(app).update(functions)
        monkeypatch.setitem(sys.modules, "cuzk_agent.app", app)

    return set_app


# --- run


def test_run_runs_the_app_with_the_configuration(set_app: SetApp, tmp_path: Path) -> None:
    ran: list[Config] = []

    def run(config: Config) -> int:
        ran.append(config)
        return 7

    set_app(run=run)
    file = tmp_path / "agent.toml"
    file.write_text('from = "start"\n[[source]]\npath = "/f"')
    options = ["--config", str(file), "--log", "/a.log", "--log", "b=/b", "--listen", "[::1]:1", "--log-level", "error"]
    assert main(["run", *options, "--state", "/s"]) == 7
    assert ran == [
        Config(
            sources=(SourceConfig("a", Path("/a.log")), SourceConfig("b", Path("/b"))),
            listen=Listen("::1", 1),
            start="start",
            log_level="error",
            state=Path("/s"),
        )
    ]
    assert logging.getLogger().level == logging.ERROR


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ListenError("cannot listen on h:1: no"), Exit.ADDRESS, "CRITICAL cuzk_agent.cli: cannot listen on h:1: no\n"),
        (ZeroDivisionError("oops\x1b[2J"), Exit.FAILED, "    ZeroDivisionError: oops\\x1b[2J\n"),
        (KeyboardInterrupt(), Exit.STOPPED, ""),
    ],
)
def test_how_run_ends(
    set_app: SetApp, capsys: pytest.CaptureFixture[str], error: BaseException, status: Exit, message: str
) -> None:
    def run(_: Config) -> int:
        raise error

    set_app(run=run)
    assert main(["run", "--log", "/a"]) == status
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("command", ["run", "check-config"])
def test_a_wrong_configuration(command: str, set_app: SetApp, capsys: pytest.CaptureFixture[str]) -> None:
    set_app()
    assert main([command, "--log", "/a", "--from", "\x1b[2J\n"]) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == 'cuzk-agent: command line: --from = \'\\x1b[2J\\n\': expected "end" or "start"\n'


# --- check-config


def test_check_config_prints_what_run_would_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUZK_AGENT_AGE_LIMIT", "90m")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/cuzk-agent:/elsewhere")
    assert main(["check-config", "--log", "cuzk=/var/log/é.log"]) == Exit.STOPPED
    printed = capsys.readouterr().out
    assert printed == (
        'listen = "127.0.0.1:9822"\nfrom = "end"\nlog_level = "info"\n'
        'state = "/var/lib/cuzk-agent/agent.state"\n\n'
        '[[source]]\nname = "cuzk"\npath = "/var/log/é.log"\n\n'
        '[timeline]\nsilence_limit = "5m"\nrolling_window = "10m"\nage_limit = "90m"\n\n'
        '[gpu]\npcie_throughput = false\nrecord = ""\nmap = {}\n'
    )
    file = tmp_path / "printed.toml"
    file.write_text(printed, encoding="utf-8")
    assert load(file=str(file)).age_limit_s == 5400


def test_check_config_prints_a_path_that_is_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--log", "a=/\udcff"]) == Exit.STOPPED
    assert 'path = "/\\udcff"\n' in capsys.readouterr().out


# --- demo


def test_demo(set_app: SetApp) -> None:
    called: list[dict[str, object]] = []

    def demo(**settings: object) -> int:
        called.append(settings)
        return 0

    set_app(demo=demo)
    assert main(["demo"]) == 0
    assert main(["demo", "--scenario", "idle", "--speed", "20", "--seed", "-3", "--listen", "127.0.0.1:0"]) == 0
    assert called == [
        {"listen": Listen("127.0.0.1", 9822), "scenario": "day", "speed": 10.0, "seed": 1},
        {"listen": Listen("127.0.0.1", 0), "scenario": "idle", "speed": 20.0, "seed": -3},
    ]


# --- usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "--log"], "argument --log: expected one argument"),
        (["run", "--list", "h:1"], "unrecognized arguments: --list h:1"),
        (["run", "/a.log"], "unrecognized arguments: /a.log\n"),
        (
            ["run", "--log", "/a-1.log", "/a-2.log", "/a-3.log"],
            "unrecognized arguments: /a-2.log /a-3.log\n--log takes one PATH; a glob of several must be quoted",
        ),
        (["run", "--log", "/a-1.log", "--list"], "unrecognized arguments: --list\n"),
        (["demo", "--speed", "0"], "argument --speed: '0': expected a number above 0, and at most 1000"),
        (["demo", "--speed", "nan"], "argument --speed: 'nan': expected a number above 0"),
        (["demo", "--speed", "fast"], "argument --speed: 'fast': expected a number above 0"),
        (["demo", "--listen", "h"], "argument --listen: 'h': expected HOST:PORT"),
        (["demo", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check-config", "--help"], ["demo", "--help"]])
def test_help_tells_the_exit_statuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    told = re.findall(r"^  (\d)  \w", capsys.readouterr().out, re.MULTILINE)
    assert told == [str(status.value) for status in Exit]


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_help_tells_what_the_files_of_several_gpus_are_called(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = re.search(r"several GPUs in a file each: (\S+) becomes (\S+)", " ".join(capsys.readouterr().out.split()))
    assert told is not None
    # Both commands name them by this.
    assert recording_paths(Path(told[1]), ["0", "1"])["0"] == Path(told[2])


def test_it_can_be_run_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "cuzk_agent", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"cuzk-agent {metadata.version('cuzk-agent')}\n"
    assert ran.stderr == ""


def test_help_and_check_config_load_neither_server_nor_driver() -> None:
    program = (
        "import sys; from cuzk_agent.cli import main; main(['check-config', '--log', '/a']);"
        "sys.exit(', '.join({'hypercorn', 'starlette', 'pynvml', 'watchdog'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stderr == "\n"


# --- its own log


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    found = logging.LogRecord("cuzk_agent.x", logging.WARNING, __file__, 1, "%s", (message,), None)
    found.created = 1_795_996_800.1239
    if error is not None:
        found.exc_info = (type(error), error, None)
    return found


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("plain — text", "plain — text"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("\u2028\u202e\udcff", r"\u2028\u202e\udcff"),
    ],
)
def test_a_logged_line(message: str, shown: str) -> None:
    assert LogFormatter().format(record(message)) == f"2026-11-30T00:00:00.123Z WARNING cuzk_agent.x: {shown}"
    assert printable(message) == shown


def test_a_logged_error_cannot_forge_a_line() -> None:
    forged = ValueError("x\n2026-11-30T00:00:00.123Z INFO cuzk_agent.x: all is well\x1b[A")
    assert LogFormatter().format(record("failed", forged)).split("\n") == [
        "2026-11-30T00:00:00.123Z WARNING cuzk_agent.x: failed",
        "    ValueError: x",
        "    2026-11-30T00:00:00.123Z INFO cuzk_agent.x: all is well\\x1b[A",
    ]


def test_the_log_goes_to_stderr_from_its_level_up(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning")
    logging.getLogger("cuzk_agent.x").info("not this")
    logging.getLogger("cuzk_agent.x").warning("but this")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\S+Z WARNING cuzk_agent\.x: but this\n", captured.err)


SEED = str(Path(__file__).parent / "data" / "seeds" / "isolated3.log")


def test_a_report_that_cannot_be_written_says_so_in_a_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cuzk_agent", "analyze", SEED], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == Exit.FAILED
    assert done.stderr == b"cuzk-agent: standard output: No space left on device\n"


def test_one_table_of_values_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", SEED, "--csv", "--jobs", "--gaps", "1s"]) == Exit.USAGE
    assert capsys.readouterr().err == "cuzk-agent: --csv: expected one table: --jobs or --gaps, not both\n"
