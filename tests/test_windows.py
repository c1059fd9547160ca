"""Rolling quantiles against the exact ones."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.windows import SLICE_S, VALUE_MAX_SECONDS, WINDOW_MAX_S, Rolling, RollingWindow, Slice

QUANTILES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)
WINDOWS_S = (60.0, 300.0, 600.0, 900.0, WINDOW_MAX_S)

values = st.one_of(
    st.floats(min_value=1e-3, max_value=VALUE_MAX_SECONDS),
    st.integers(min_value=1, max_value=60_000).map(lambda ms: ms / 1000),
)
steps = st.one_of(st.just(0.0), st.floats(min_value=0, max_value=20), st.floats(min_value=0, max_value=2000))
observations = st.lists(st.tuples(steps, values), max_size=200)


def nearest_rank(ordered: list[float], q: float) -> float:
    return ordered[max(1, math.ceil(q * len(ordered) - 1e-9)) - 1]


def fill(steps_and_values: list[tuple[float, float]]) -> tuple[RollingWindow, list[tuple[float, float]], float]:
    window, seen, at_s = RollingWindow(), [], 1000.0
    for step_s, value in steps_and_values:
        at_s += step_s
        window.observe(at_s, value)
        seen.append((at_s, value))
    return window, seen, at_s


@given(observations, st.floats(min_value=0, max_value=4000), st.sampled_from(WINDOWS_S))
def test_quantiles_are_within_two_percent_of_exact_ones(
    steps_and_values: list[tuple[float, float]], idle_s: float, window_s: float
) -> None:
    window, seen, at_s = fill(steps_and_values)
    now_s = at_s + idle_s
    rolling = window.freeze(now_s)
    # A slice expires as a whole: the exact window is some suffix between these two.
    most = [value for at_s, value in seen if at_s > now_s - window_s - SLICE_S]
    least = sum(at_s > now_s - window_s for at_s, _ in seen)
    count = rolling.count(window_s)
    assert least <= count <= len(most)
    counted = sorted(most[len(most) - count :])
    assert rolling.sum(window_s) == pytest.approx(math.fsum(counted))
    for q in QUANTILES:
        if counted:
            assert rolling.quantile(q, window_s) == pytest.approx(nearest_rank(counted, q), rel=0.02)
        else:
            assert rolling.quantile(q, window_s) is None


@given(st.lists(st.tuples(st.floats(min_value=SLICE_S, max_value=300), values), max_size=100))
def test_the_window_is_exact_when_no_two_observations_share_a_slice(
    steps_and_values: list[tuple[float, float]],
) -> None:
    window, seen, now_s = fill(steps_and_values)
    for window_s in WINDOWS_S:
        assert window.freeze(now_s).count(window_s) == sum(at_s > now_s - window_s for at_s, _ in seen)


@given(observations)
def test_totals_never_fall_and_nothing_frozen_changes(steps_and_values: list[tuple[float, float]]) -> None:
    window, at_s = RollingWindow(), 0.0
    frozen: list[tuple[Rolling, bytes]] = []
    for step_s, value in steps_and_values:
        at_s += step_s
        window.observe(at_s, value)
        rolling = window.freeze(at_s)
        frozen.append((rolling, pickle.dumps(asdict(rolling))))
    for rolling, as_it_was in frozen:
        assert pickle.dumps(asdict(rolling)) == as_it_was
    assert [rolling.total_count for rolling, _ in frozen] == list(range(1, len(frozen) + 1))
    sums = [rolling.total_sum_seconds for rolling, _ in frozen]
    assert sums == sorted(sums)


def test_an_empty_window_has_no_quantile() -> None:
    rolling = RollingWindow().freeze(5.0)
    assert rolling == Rolling(5.0)
    assert (rolling.count(60), rolling.sum(60), rolling.quantile(0.5, 60)) == (0, 0.0, None)


def test_expired_observations_do_not_count() -> None:
    window = RollingWindow()
    window.observe(0.0, 100.0)
    window.observe(50.0, 1.0)
    assert window.freeze(59.9).count(60) == 2
    assert window.freeze(60.0).count(60) == 1
    assert window.freeze(60.0).quantile(1.0, 60) == pytest.approx(1.0, rel=0.01)
    assert window.freeze(110.0).quantile(1.0, 60) is None
    assert window.freeze(110.0).count(600) == 2


def test_memory_is_bounded_without_a_freeze() -> None:
    window = RollingWindow()
    for i in range(40_000):
        window.observe(i * 0.7, (i * 7919 % 100_003) / 7)
    assert len(window.closed) <= WINDOW_MAX_S / SLICE_S + 1
    storm = RollingWindow()
    for i in range(20_000):
        storm.observe(0.0, 1.00123**i * 1e-4)
    assert storm.current is not None
    assert len(storm.current.counts) < 1000


def test_memory_is_given_back_when_nothing_comes() -> None:
    window = RollingWindow()
    for i in range(100):
        window.observe(i * SLICE_S, 1.0)
    window.freeze(100 * SLICE_S + WINDOW_MAX_S)
    assert window.closed == ()


def test_a_late_observation_joins_the_current_slice() -> None:
    window = RollingWindow()
    window.observe(0.0, 1.0)
    window.observe(20.0, 2.0)
    before = window.freeze(20.0)
    window.observe(3.0, 4.0)
    assert before.count(60) == 2
    assert window.freeze(20.0).quantile(1.0, 60) == pytest.approx(4.0, rel=0.01)
    assert window.freeze(79.0).count(60) == 2
    assert window.freeze(80.0).count(60) == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, 0.0),
        (-1.0, 0.0),
        (1e-9, 0.0),
        (math.nan, 0.0),
        (5.002 - 5.001, 0.001),
        (0.001, 0.001),
        (VALUE_MAX_SECONDS, VALUE_MAX_SECONDS),
        (1e9, VALUE_MAX_SECONDS),
        (math.inf, VALUE_MAX_SECONDS),
    ],
)
def test_values_out_of_range_are_clamped(value: float, shown: float) -> None:
    window = RollingWindow()
    window.observe(0.0, value)
    rolling = window.freeze(0.0)
    assert rolling.quantile(0.5, 60) == pytest.approx(shown, rel=0.01)
    assert math.isfinite(rolling.sum(60))


def test_a_window_is_plain_data() -> None:
    window, _, _ = fill([(i % 7, 0.001 * 3**i) for i in range(20)])
    assert pickle.loads(pickle.dumps(window)) == window
    saved = json.loads(json.dumps(asdict(window)))
    restored = RollingWindow(
        tuple(
            Slice(s["first_s"], s["last_s"], tuple((b, n) for b, n in s["counts"]), s["sum_seconds"])
            for s in saved["closed"]
        ),
        Slice(**saved["current"] | {"counts": tuple((b, n) for b, n in saved["current"]["counts"])}),
        saved["total_count"],
        saved["total_sum_seconds"],
    )
    assert restored == window
