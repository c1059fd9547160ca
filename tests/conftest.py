"""What all tests share: a clock that only moves when told to, and the profiles of hypothesis."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The same random programs every time, for a verdict that can be trusted. For the curious, as many others as wanted:
# PROGRAMS=10000 pytest --timeout 0 --hypothesis-seed 1 tests/log/test_model.py tests/test_restart.py
PROGRAMS = os.environ.get("PROGRAMS")
settings.register_profile(
    "cuzk-agent",
    max_examples=int(PROGRAMS or 100),
    derandomize=PROGRAMS is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cuzk-agent")


class FakeClock:
    """A `Clock` at 1,000 s since boot and 2026-11-30 00:00 UTC, until it is moved."""

    def __init__(self) -> None:
        self._monotonic_s = 1_000.0
        self._unix_s = 1_795_996_800.0

    def monotonic_s(self) -> float:
        """The monotonic clock."""
        return self._monotonic_s

    def unix_s(self) -> float:
        """The wall clock."""
        return self._unix_s

    def advance(self, seconds: float) -> None:
        """Lets time pass on both clocks."""
        self._monotonic_s += seconds
        self._unix_s += seconds

    def step_wall(self, seconds: float) -> None:
        """Steps the wall clock alone, as an operator or NTP does."""
        self._unix_s += seconds


@pytest.fixture
def clock() -> FakeClock:
    """A clock of the test's own."""
    return FakeClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update` rewrites golden files with what is shown now, to be looked at in the diff."""
    parser.addoption("--update", action="store_true", help="rewrite golden files with what is shown now")
