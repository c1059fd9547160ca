"""Run the simulated prover: `python -m cuzk_agent.demo --log PATH`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from threading import Event

from cuzk_agent.clock import system_clock
from cuzk_agent.demo.prover import DEFAULT_SPEED, Prover
from cuzk_agent.demo.scenario import SCENARIOS


def main() -> None:
    """Write a log until SIGINT, which ends it with a prover's last words; SIGTERM kills without a word, as there."""
    parser = argparse.ArgumentParser(
        prog="python -m cuzk_agent.demo", description="A simulated prover that writes a log."
    )
    parser.add_argument("--log", type=Path, required=True, metavar="PATH", help="file to append to")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same events (default: %(default)s)")
    parser.add_argument(
        "--speed", type=_speed, default=DEFAULT_SPEED, help="how many times faster than life (default: %(default)g)"
    )
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="day", help="what happens to it (default: %(default)s)"
    )
    parser.add_argument(
        "--rotate-bytes",
        type=int,
        metavar="N",
        help="rename the log to PATH.1 when it has grown beyond (default: never)",
    )
    arguments = parser.parse_args()

    interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    # Set even where the parent made it ignored, as shells do for what they start in the background.
    signal.signal(signal.SIGINT, interrupt)
    scenario = SCENARIOS[arguments.scenario]
    prover = Prover(scenario, seed=arguments.seed, speed=arguments.speed, clock=system_clock())
    prover.run(arguments.log, stop=lambda: interrupted, sleep=Event().wait, rotate_bytes=arguments.rotate_bytes)


def _speed(text: str) -> float:
    speed = float(text)
    if not 0.1 <= speed <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 1000")
    return speed


if __name__ == "__main__":
    main()
