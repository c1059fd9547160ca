"""Files of a simulated prover, written at once: its log, the truth about it, and what NVML says of its GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from cuzk_agent.demo.chips import nvml_paths
from cuzk_agent.demo.prover import Written, write_log
from cuzk_agent.demo.scenario import Scenario

START_UNIX_MS = 1_796_000_000_000.0
"""When every simulation begins that nothing ties to the present: the same seed gives the same bytes."""


def simulate(
    scenario: Scenario,
    *,
    seed: int,
    speed: float,
    min_lines: int | None,
    log: Path,
    truth: Path | None,
    nvml: Path | None,
) -> Written:
    """Write the files, which must not exist yet. If that fails or is interrupted none is left.

    Without `min_lines` the scenario is gone through once, and the daemon shut down.
    """
    asked = [path for path in (log, truth) if path is not None]
    if nvml is not None:
        asked += nvml_paths(nvml, scenario.setting.gpus)
    taken = [str(path) for path in asked if path.exists()]
    if taken:
        raise FileExistsError(f"already there: {', '.join(taken)}")
    try:
        written = write_log(
            log,
            scenario,
            seed,
            start_unix_ms=START_UNIX_MS,
            speed=speed,
            rounds=1 if min_lines is None else None,
            min_lines=min_lines,
            nvml=nvml,
        )
        if truth is not None:
            about = {"seed": seed, "speed": speed, "lines": written.lines, "torn": written.torn}
            truth.write_text(json.dumps({**about, **written.truth.as_json()}, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        for path in asked:
            path.unlink(missing_ok=True)
        raise
    return written
