"""How fast a log is analyzed, and in how much memory: python benchmarks/analyze.py big.log [--profile]."""

from __future__ import annotations

import cProfile
import pstats
import resource
import sys
from time import process_time

from cuzk_agent.report.analyze import analyze


def main() -> None:
    """Analyze the log once and tell."""
    path = sys.argv[1]
    profile = cProfile.Profile() if "--profile" in sys.argv else None
    began_s = process_time()
    if profile is not None:
        profile.enable()
    report, fault = analyze([path])
    if profile is not None:
        profile.disable()
    took_s = process_time() - began_s
    if fault is not None:
        sys.exit(str(fault))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{report.bytes / 1e6:,.0f} MB, {report.lines:,} lines in {took_s:.1f} s: "
        f"{report.bytes / 1e6 / took_s:.1f} MB/s, {report.lines / took_s:,.0f} lines/s, peak {peak_mib:.0f} MiB"
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
