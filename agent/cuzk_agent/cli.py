"""The command line."""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cuzk_agent.config import DEFAULT_LISTEN, Config, ConfigError, Listen, load, parse_listen, to_toml
from cuzk_agent.demo.scenario import SCENARIOS
from cuzk_agent.report.arguments import Bound, parse_bound, parse_duration_ms, parse_recording
from cuzk_agent.report.words import printable as printable  # noqa: PLC0414  Its users find it here.

if TYPE_CHECKING:
    from cuzk_agent.report.command import Answer
    from cuzk_agent.report.conditions import Condition
    from cuzk_agent.report.progress import ProgressLine
    from cuzk_agent.report.render import Style

logger = logging.getLogger(__name__)
T = TypeVar("T")
_INTERRUPTED = 130
"""What shells make of a command that SIGINT ended."""


class Exit(IntEnum):
    """What the process ends with."""

    STOPPED = 0
    """It was asked to stop, or had nothing more to do."""
    FAILED = 1
    """Something unexpected happened; its log says what."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    ADDRESS = 3
    """It cannot listen on its address."""
    NO_DATA = 4
    """A log cannot be read, or tells of no work on a GPU."""
    CONDITION = 5
    """A condition of `--fail-if` holds."""


_EXIT_HELP = f"""\
exit status:
  {Exit.STOPPED}  done, or stopped as asked
  {Exit.FAILED}  unexpected failure
  {Exit.USAGE}  wrong command line or configuration
  {Exit.ADDRESS}  cannot listen on the address
  {Exit.NO_DATA}  a log cannot be read, or tells of no work on a GPU
  {Exit.CONDITION}  a condition of --fail-if holds
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out a command line, by default the process's own, and returns its exit status."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_about_quotes(arguments, unknown)}")
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        print(f"cuzk-agent: {printable(str(error))}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        return Exit.STOPPED


def _about_quotes(arguments: argparse.Namespace, unknown: Sequence[str]) -> str:
    """What may have happened if paths follow that of --log."""
    if not getattr(arguments, "log", None) or any(argument.startswith("-") for argument in unknown):
        return ""
    return (
        "\n--log takes one PATH; a glob of several must be quoted, or the shell expands it: --log '/var/log/cuzk-*.log'"
    )


def _run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    set_up_logging(config.log_level)

    def work() -> int:
        from cuzk_agent.app import run  # noqa: PLC0415  see _serve

        return run(config)

    return _serve(work)


def _check_config(arguments: argparse.Namespace) -> int:
    print(to_toml(_config(arguments)).encode(errors="backslashreplace").decode(), end="")
    return Exit.STOPPED


def _demo(arguments: argparse.Namespace) -> int:
    set_up_logging("info")

    def work() -> int:
        from cuzk_agent.app import demo  # noqa: PLC0415  see _serve

        return demo(listen=arguments.listen, scenario=arguments.scenario, speed=arguments.speed, seed=arguments.seed)

    return _serve(work)


def _simulate(arguments: argparse.Namespace) -> int:
    from cuzk_agent.demo.simulate import simulate  # noqa: PLC0415  the other commands do without

    try:
        written = simulate(
            SCENARIOS[arguments.scenario],
            seed=arguments.seed,
            speed=arguments.speed,
            min_lines=arguments.lines,
            log=arguments.output,
            truth=arguments.truth,
            nvml=arguments.nvml,
        )
    except OSError as error:
        print(f"cuzk-agent: {printable(str(error))}", file=sys.stderr)
        return Exit.USAGE
    print(f"{arguments.output}: {written.lines} lines, of which {written.torn} torn", file=sys.stderr)
    return Exit.STOPPED


def _analyze(arguments: argparse.Namespace) -> int:
    from cuzk_agent.report.analyze import Options  # noqa: PLC0415  see _serve
    from cuzk_agent.report.command import Form, run_analyze  # noqa: PLC0415
    from cuzk_agent.report.model import LONG_GAP_MS  # noqa: PLC0415

    if arguments.csv and arguments.jobs and arguments.gaps is not None:
        raise ConfigError("--csv: expected one table: --jobs or --gaps, not both")
    if arguments.start is not None and arguments.end is not None and arguments.end.is_before(arguments.start):
        raise ConfigError("--to: the stretch ends before it begins; expected a time after that of --from")
    long_gap_ms = LONG_GAP_MS if arguments.gaps is None and arguments.json else arguments.gaps
    recordings = _recordings(arguments)
    options = Options(long_gap_ms, start=arguments.start, end=arguments.end, recordings=recordings)
    with _progress() as progress:
        answer = run_analyze(
            arguments.logs,
            options,
            form=Form.JSON if arguments.json else Form.CSV if arguments.csv else Form.TEXT,
            jobs=arguments.jobs,
            gaps=arguments.gaps is not None,
            style=_style(),
            on_progress=progress,
        )
    return _answer(answer)


def _compare(arguments: argparse.Namespace) -> int:
    from cuzk_agent.report.command import Form, run_compare  # noqa: PLC0415  see _serve

    with _progress() as progress:
        answer = run_compare(
            arguments.base,
            arguments.new,
            conditions=arguments.fail_if,
            form=Form.JSON if arguments.json else Form.TEXT,
            style=_style(),
            on_progress=progress,
        )
    return _answer(answer)


def _trace(arguments: argparse.Namespace) -> int:
    from cuzk_agent.report.trace import run_trace  # noqa: PLC0415  see _serve

    if arguments.output is None and arguments.html is None:
        raise ConfigError("trace: nothing to write; give -o FILE, --html FILE, or both")
    try:
        with _progress() as progress:
            answer = run_trace(
                arguments.logs,
                _recordings(arguments),
                trace=arguments.output,
                html=arguments.html,
                on_progress=progress,
            )
    except OSError as error:
        print(f"cuzk-agent: {printable(str(error))}", file=sys.stderr)
        return Exit.USAGE
    return _answer(answer)


def _recordings(arguments: argparse.Namespace) -> dict[str, str]:
    recordings = dict(arguments.nvml)
    if len(recordings) < len(arguments.nvml):
        raise ConfigError("--nvml: two files for one GPU; name it, as in 1=FILE")
    return recordings


@contextmanager
def _progress() -> Iterator[ProgressLine]:
    from cuzk_agent.clock import system_clock  # noqa: PLC0415  see _serve
    from cuzk_agent.report.progress import ProgressLine  # noqa: PLC0415

    with closing(ProgressLine(sys.stderr, system_clock())) as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            # Half a report is none, and whoever waits for it must not take it for one.
            sys.exit(_INTERRUPTED)


def _style() -> Style:
    from cuzk_agent.report.render import MIN_WIDTH, Style  # noqa: PLC0415  see _serve

    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = shutil.get_terminal_size().columns if terminal or os.environ.get("COLUMNS") else MIN_WIDTH
    return Style(colour, max(MIN_WIDTH, columns))


def _answer(answer: Answer) -> int:
    for complaint in answer.complaints:
        print(f"cuzk-agent: {printable(complaint)}", file=sys.stderr)
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(answer.output.encode(sys.stdout.encoding, "replace"))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has seen enough. Nothing is left to be written when the interpreter ends.
        _write_no_more()
    except OSError as error:
        print(f"cuzk-agent: standard output: {error.strerror or error}", file=sys.stderr)
        _write_no_more()
        return Exit.FAILED
    return Exit[answer.ending.name]


def _write_no_more() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _serve(work: Callable[[], int]) -> int:
    # The server and what it needs are imported here: --help and check-config are quick without them.
    from cuzk_agent.server import ListenError  # noqa: PLC0415

    try:
        return work()
    except ListenError as error:
        logger.critical("%s", error)
        return Exit.ADDRESS
    except Exception:
        logger.exception("unexpected failure")
        return Exit.FAILED


def _config(arguments: argparse.Namespace) -> Config:
    options = {
        "--listen": arguments.listen,
        "--from": arguments.start,
        "--log-level": arguments.log_level,
        "--state": arguments.state,
        "--record-nvml": arguments.record_nvml,
    }
    return load(
        file=arguments.config,
        logs=arguments.log,
        journals=arguments.journal,
        tee=arguments.tee,
        options={name: value for name, value in options.items() if value is not None},
        environ=os.environ,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuzk-agent",
        description="Live monitoring agent for cuzk: follows the daemon's log and its GPUs, serves Prometheus metrics.",
        epilog=_EXIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('cuzk-agent')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str,
        command: Callable[[argparse.Namespace], int],
        text: str,
        parents: Sequence[argparse.ArgumentParser] = (),
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=parents,
        )
        added.set_defaults(command=command)
        return added

    configured = argparse.ArgumentParser(add_help=False)
    configured.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a log to follow, a quoted glob of several, or - for stdin; may be given several times; NAME is its label "
        "`source`, by default from the file's name",
    )
    configured.add_argument(
        "--journal",
        action="append",
        default=[],
        metavar="[NAME=]UNIT",
        help="a systemd unit to follow in the journal, may be given several times",
    )
    configured.add_argument("--tee", action="store_true", help="with --log -: pass stdin on to stdout")
    configured.add_argument("--config", metavar="FILE", help="TOML file; the environment and options override it")
    configured.add_argument("--listen", metavar="HOST:PORT", help=f"address of the HTTP server ({DEFAULT_LISTEN})")
    configured.add_argument(
        "--from",
        dest="start",
        metavar="end|start",
        help="where to begin in a log that is not known yet (end)",
    )
    configured.add_argument(
        "--state",
        metavar="PATH|off",
        help="file in which what is known is kept for the next start ($STATE_DIRECTORY/agent.state under systemd, else "
        "$XDG_STATE_HOME/cuzk-agent/agent.state)",
    )
    configured.add_argument("--log-level", metavar="debug|info|warning|error", help="of the agent's own log (info)")
    configured.add_argument(
        "--record-nvml",
        metavar="FILE",
        help="also keep what NVML says, for `analyze --nvml`; of several GPUs in a file each: x.jsonl becomes "
        "x.gpu0.jsonl",
    )
    add("run", _run, "follow logs and serve metrics", parents=[configured])
    add("check-config", _check_config, "print the effective configuration, or what is wrong", parents=[configured])

    analyze = add("analyze", _analyze, "report on a log after the run")
    analyze.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="the parts of one log, in any order: files (.gz, .zst, .xz, .bz2 too), quoted globs, or - for stdin",
    )
    form = analyze.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything, as JSON")
    form.add_argument("--csv", action="store_true", help="the GPUs as CSV; with --jobs or --gaps these instead")
    analyze.add_argument("--jobs", action="store_true", help="with a table of the jobs")
    analyze.add_argument("--gaps", type=_gap_length, metavar="LENGTH", help="with the gaps of this length and more")
    for option, dest, text in (("--from", "start", "from"), ("--to", "end", "up to")):
        analyze.add_argument(
            option,
            dest=dest,
            type=_bound,
            metavar="TIME",
            help=f"only {text} this time: since the engine's start (90s, 0:03:02.863), or a date and time (UTC)",
        )

    simulated = argparse.ArgumentParser(add_help=False)
    simulated.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="day",
        metavar="NAME",
        help=f"what happens: {', '.join(SCENARIOS)} (day)",
    )
    simulated.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, another run (1)")
    trace = add("trace", _trace, "draw a run: a trace for ui.perfetto.dev, or a page that opens offline")
    trace.add_argument("logs", nargs="+", metavar="LOG", help="the parts of one log, as for analyze")
    trace.add_argument("-o", "--output", type=Path, metavar="FILE", help="the trace, in the trace event format (JSON)")
    trace.add_argument("--html", type=Path, metavar="FILE", help="a waterfall, as one page that needs nothing else")
    for command in (analyze, trace):
        command.add_argument(
            "--nvml",
            type=parse_recording,
            action="append",
            default=[],
            metavar="[GPU=]FILE",
            help="with recorded NVML samples of a GPU, by default the one in its name (gpu1), or else 0; repeatable",
        )
    compare = add("compare", _compare, "set runs side by side, and tell changes from noise")
    compare.add_argument("base", metavar="BASE", help="a log: a file, a quoted glob of its parts, or - for stdin")
    compare.add_argument("new", nargs="+", metavar="NEW", help="another one, or several: each is set against BASE")
    compare.add_argument("--json", action="store_true", help="as JSON")
    compare.add_argument(
        "--fail-if",
        type=_condition,
        action="append",
        default=[],
        metavar="CONDITION",
        help="end with status 5 if this holds, e.g. 'logged_utilization<0.9 or change.proof_mean_s>5%%'",
    )

    demo = add("demo", _demo, "serve metrics of a simulated daemon and GPU", parents=[simulated])
    demo.add_argument("--speed", type=_speed, default=10.0, metavar="X", help="times as fast as real life (10)")
    demo.add_argument(
        "--listen",
        type=_listen,
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"address of the HTTP server ({DEFAULT_LISTEN})",
    )
    simulate = add("simulate", _simulate, "write the log of a simulated daemon at once", parents=[simulated])
    simulate.add_argument("-o", "--output", type=Path, required=True, metavar="LOG", help="the log, a new file")
    simulate.add_argument("--truth", type=Path, metavar="FILE", help="also write what is true of it, as JSON")
    simulate.add_argument(
        "--nvml",
        type=Path,
        metavar="FILE",
        help="also write what NVML says, as JSON lines; of several GPUs in a file each: x.jsonl becomes x.gpu0.jsonl",
    )
    simulate.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="times as fast as real life (1)")
    simulate.add_argument(
        "--lines", type=_lines, metavar="N", help="end in the midst of work, after N lines (the scenario once)"
    )
    return parser


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 1_000_000_000):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, and at most 1000000000")
    return int(text)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, and at most 1000")
    return speed


def _gap_length(text: str) -> int:
    return _checked(parse_duration_ms, text)


def _bound(text: str) -> Bound:
    return _checked(parse_bound, text)


def _condition(text: str) -> Condition:
    from cuzk_agent.report.compare import NAMES  # noqa: PLC0415  see _serve
    from cuzk_agent.report.conditions import parse_condition  # noqa: PLC0415

    return _checked(lambda condition: parse_condition(condition, NAMES), text)


def _checked(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {error}") from None


def _listen(text: str) -> Listen:
    return _checked(parse_listen, text)


def set_up_logging(level: str) -> None:
    """Sends the process's log to stderr, from `level` (a name) up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LogFormatter(logging.Formatter):
    """`2026-11-30T14:05:09.123Z WARNING cuzk_agent.log: message`, in UTC; tracebacks are indented below.

    What is logged may come from the followed logs or from HTTP clients: escaping it keeps anyone from forging lines
    or sending control sequences to a terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002  the base's
        """The record's time."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback, indented."""
        return "\n".join("    " + printable(line) for line in super().formatException(ei).split("\n"))
