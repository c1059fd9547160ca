from __future__ import annotations

import pytest

from cuzk_agent.timeline.anchor import Anchor

E_MS = 1_796_040_000_000.0


def found(anchor: Anchor) -> tuple[float, float]:
    assert anchor.start_unix_ms is not None
    assert anchor.uncertainty_ms is not None
    return anchor.start_unix_ms, anchor.uncertainty_ms


def test_nothing_is_known_from_one_kind_of_line() -> None:
    anchor = Anchor()
    assert (anchor.start_unix_ms, anchor.uncertainty_ms) == (None, None)
    anchor.note_event(100)
    anchor.note_event(200)
    assert anchor.start_unix_ms is None
    other = Anchor()
    other.note_tracing(E_MS)
    other.note_tracing(E_MS + 5)
    assert other.start_unix_ms is None


def test_one_side_alone_does_not_pin_it() -> None:
    anchor = Anchor()
    anchor.note_event(100)
    anchor.note_tracing(E_MS + 100.4)
    assert anchor.start_unix_ms is None
    other = Anchor()
    other.note_tracing(E_MS + 100.4)
    other.note_event(100)
    assert other.start_unix_ms is None


def test_the_start_line_is_the_start() -> None:
    anchor = Anchor()
    anchor.note_start(E_MS)
    assert found(anchor) == (E_MS, 1.0)
    # Bounds that agree more or less do not move it.
    anchor.note_event(100)
    anchor.note_tracing(E_MS + 80)
    anchor.note_event(130)
    assert found(anchor) == (E_MS, 1.0)


def test_neighbours_pin_it_from_both_sides() -> None:
    anchor = Anchor()
    anchor.note_tracing(E_MS + 500)
    anchor.note_event(502)
    anchor.note_tracing(E_MS + 503)
    # E > T - o - 1 before, E <= T - o after.
    assert found(anchor) == (E_MS - 1, 2.0)


def test_more_lines_only_ever_narrow_it() -> None:
    anchor = Anchor()
    anchor.note_tracing(E_MS)
    uncertainties = []
    for at_ms, wait_ms in [(0, 400), (1000, 90), (2000, 20), (3000, 300), (4000, 2)]:
        anchor.note_event(at_ms)
        anchor.note_tracing(E_MS + at_ms + wait_ms)
        anchor.note_event(at_ms + wait_ms + 1)
        # Whoever writes last is not a neighbour of what comes a long time later.
        anchor.note_tracing(E_MS + at_ms + 900)
        start_ms, uncertainty_ms = found(anchor)
        assert abs(start_ms - E_MS) <= uncertainty_ms
        uncertainties.append(uncertainty_ms)
    assert uncertainties == sorted(uncertainties, reverse=True)
    assert uncertainties[-1] <= 2


def test_only_the_nearest_neighbours_count() -> None:
    """Of several tracing lines before an event the last bounds it best, of several events the last before a line."""
    anchor = Anchor()
    anchor.note_tracing(E_MS)
    anchor.note_tracing(E_MS + 1000)
    anchor.note_event(1000)
    anchor.note_event(1005)
    anchor.note_tracing(E_MS + 1005)
    assert found(anchor) == (E_MS - 0.5, 0.5)


def test_it_is_not_known_where_it_may_be_off_by_seconds() -> None:
    anchor = Anchor()
    anchor.note_tracing(E_MS)
    anchor.note_event(3000)
    anchor.note_tracing(E_MS + 3001)
    assert anchor.start_unix_ms is None


def test_threads_that_were_interrupted_cross_the_bounds_a_little() -> None:
    anchor = Anchor()
    anchor.note_tracing(E_MS + 100)
    anchor.note_event(90)
    anchor.note_tracing(E_MS + 89)
    # E > T - o - 1 = 9 and E <= -1: the middle, and as uncertain as they are apart, and a little more.
    assert found(anchor) == (E_MS + 4, 6.0)


def test_a_clock_that_was_set_is_followed() -> None:
    anchor = Anchor()
    anchor.note_start(E_MS)
    anchor.note_event(1000)
    anchor.note_tracing(E_MS + 1001)
    anchor.note_event(1002)
    step_ms = 60_000
    # One second to one side of its neighbour only: still no contradiction.
    anchor.note_tracing(E_MS + step_ms + 2000)
    anchor.note_event(2001)
    anchor.note_tracing(E_MS + step_ms + 2002)
    start_ms, uncertainty_ms = found(anchor)
    assert abs(start_ms - E_MS - step_ms) <= uncertainty_ms <= 2


@pytest.mark.parametrize("drift_ms", [-100, 100])
def test_a_clock_that_drifts_is_followed_in_time(drift_ms: int) -> None:
    anchor = Anchor()
    for at_ms in range(0, 10_000_000, 10_000):
        offset = drift_ms * at_ms / 10_000_000
        anchor.note_tracing(E_MS + at_ms + offset)
        anchor.note_event(at_ms)
        anchor.note_tracing(E_MS + at_ms + 1 + offset)
    start_ms, uncertainty_ms = found(anchor)
    assert abs(start_ms - E_MS - drift_ms) <= uncertainty_ms + 1
    assert uncertainty_ms < 40


def test_without_tracing_lines_the_promptest_delivery_tells() -> None:
    anchor = Anchor()
    for index, late_ms in enumerate((900, 40, 3, 700, 12)):
        anchor.note_event(index * 1000)
        anchor.note_delivery(index * 1000, E_MS + index * 1000 + late_ms)
    start_ms, uncertainty_ms = found(anchor)
    assert start_ms == E_MS + 3
    assert uncertainty_ms == 25
    # What tells more precisely is believed more.
    anchor.note_tracing(E_MS + 4001)
    anchor.note_event(4001)
    anchor.note_tracing(E_MS + 4002)
    start_ms, uncertainty_ms = found(anchor)
    assert abs(start_ms - E_MS) <= uncertainty_ms <= 2


def test_a_clock_that_was_set_is_followed_in_deliveries_too() -> None:
    anchor = Anchor()
    for index in range(300):
        anchor.note_delivery(index * 1000, E_MS + index * 1000 + (60_000 if index > 100 else 0))
    assert found(anchor) == (E_MS + 60_000, 25)
