"""What all tests share: a clock that only moves when told to, and the profiles of hypothesis."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# `ci`: the same examples every time, for a verdict that can be trusted. `explore`: many new ones, for the curious
# (HYPOTHESIS_PROFILE=explore make test).
settings.register_profile(
    "ci",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


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
