"""The command line: `run`, `check-config` and `demo`."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from importlib import metadata
from typing import Any

from cuzk_agent.config import DEFAULT_LISTEN, Config, ConfigError, Listen, load, parse_listen, to_toml

logger = logging.getLogger(__name__)


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


_EXIT_HELP = f"""\
exit status:
  {Exit.STOPPED}  stopped as asked
  {Exit.FAILED}  unexpected failure
  {Exit.USAGE}  wrong command line or configuration
  {Exit.ADDRESS}  cannot listen on the address
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out a command line, by default the process's own, and returns its exit status."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        print(f"cuzk-agent: {printable(str(error))}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        return Exit.STOPPED


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

        return demo(listen=arguments.listen, speed=arguments.speed, seed=arguments.seed)

    return _serve(work)


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
    options = {"--listen": arguments.listen, "--from": arguments.start, "--log-level": arguments.log_level}
    return load(
        file=arguments.config,
        logs=arguments.log,
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
        help="a log to follow, may be given several times; NAME is its label `source`, by default from the file's name",
    )
    configured.add_argument("--config", metavar="FILE", help="TOML file; the environment and options override it")
    configured.add_argument("--listen", metavar="HOST:PORT", help=f"address of the HTTP server ({DEFAULT_LISTEN})")
    configured.add_argument(
        "--from",
        dest="start",
        metavar="end|start",
        help="where to begin in a log that is not known yet (end)",
    )
    configured.add_argument("--log-level", metavar="debug|info|warning|error", help="of the agent's own log (info)")
    add("run", _run, "follow logs and serve metrics", parents=[configured])
    add("check-config", _check_config, "print the effective configuration, or what is wrong", parents=[configured])

    demo = add("demo", _demo, "serve metrics of a simulated daemon and GPU")
    demo.add_argument("--speed", type=_speed, default=10.0, metavar="X", help="times as fast as real life (10)")
    demo.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, another run (1)")
    demo.add_argument(
        "--listen",
        type=_listen,
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"address of the HTTP server ({DEFAULT_LISTEN})",
    )
    return parser


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, and at most 1000")
    return speed


def _listen(text: str) -> Listen:
    try:
        return parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {error}") from None


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


def printable(text: str) -> str:
    """`text` with everything that is not printable (line ends too) as a backslash escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )
