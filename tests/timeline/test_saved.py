"""A pipeline that was saved and loaded goes on as if nothing had happened, whatever was in it."""

from __future__ import annotations

import json
import lzma
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.timeline import saved
from cuzk_agent.timeline.codec import schema
from cuzk_agent.timeline.engine import Limits
from cuzk_agent.timeline.parser import LineParser
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import TimelineState
from timeline.test_properties import Op, Writer, programs, steps_of

SEEDS = Path(__file__).parent.parent / "data" / "seeds"


def roundtrip(pipeline: Pipeline, limits: Limits | None = None, saver: saved.Saver | None = None) -> Pipeline:
    stored = json.dumps((saver or saved.Saver(pipeline)).save())
    loaded = Pipeline(limits)
    saved.load(loaded, json.loads(stored))
    return loaded


def portrait(thing: Any) -> object:
    """All that can be reached from an object, by looking at it and not at any table; what is the same object twice is
    told from two that are equal, unless it can't change."""
    numbers: dict[int, int] = {}
    alive: list[object] = []

    def draw(value: Any) -> object:
        match value:
            case None | bool() | int() | float() | str() | bytes() | Enum():
                return (type(value).__name__, value)
            case dict() | Mapping():
                return ("dict", [(draw(key), draw(one)) for key, one in value.items()])
            case deque():
                return ("deque", value.maxlen, [draw(one) for one in value])
            case set():
                return ("set", [draw(one) for one in sorted(value, key=lambda one: getattr(one, "number", str(one)))])
            case list() | tuple():
                return (type(value).__name__, [draw(one) for one in value])
        if callable(value):
            return "callable"
        if not getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
            if id(value) in numbers:
                return ("again", numbers[id(value)])
            numbers[id(value)] = len(numbers)
            alive.append(value)
        left_out = {"_tracing", "_listeners"} if isinstance(value, Pipeline | LineParser) else set()
        names = [*getattr(value, "__dict__", {}), *(n for kind in type(value).__mro__ for n in _slots(kind))]
        return (type(value).__name__, [(name, draw(getattr(value, name))) for name in names if name not in left_out])

    return draw(thing)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


# --- random programs


def final(
    program: list[Op],
    arrival_of: Callable[[Writer], Arrival | None],
    limits: Limits,
    between: Callable[[int, Pipeline], Pipeline],
) -> tuple[TimelineState, object]:
    writer, pipeline = Writer(), Pipeline(limits)
    for number, (op, lines) in enumerate(steps_of(program, writer)):
        pipeline = between(number, pipeline)
        for line in lines:
            pipeline.feed([line], arrival_of(writer))
        if op.what == "settle":
            pipeline.settle(writer.monotonic_s, writer.unix_s)
        if op.what == "state":
            pipeline.state()
    pipeline.finish()
    return pipeline.state(), portrait(pipeline)


@given(programs, st.sampled_from((None, False, True)), st.sampled_from((None, 3000)), st.data())
def test_restarts_make_no_difference(
    program: list[Op], live: bool | None, age_ms: int | None, data: st.DataObject
) -> None:
    limits = Limits(age_ms=age_ms)
    restarts = data.draw(st.sets(st.integers(0, len(program) - 1), max_size=4))

    def arrival_of(writer: Writer) -> Arrival | None:
        return None if live is None else Arrival(writer.monotonic_s, writer.unix_s, live)

    def restart(number: int, pipeline: Pipeline) -> Pipeline:
        if number not in restarts:
            return pipeline
        # The state behind a page is what is saved, and asking for it makes no difference.
        shown = pipeline.state()
        loaded = roundtrip(pipeline, limits)
        assert loaded.state() == shown
        assert portrait(loaded) == portrait(pipeline)
        return loaded

    def look(number: int, pipeline: Pipeline) -> Pipeline:
        if number in restarts:
            pipeline.state()
        return pipeline

    assert final(program, arrival_of, limits, restart) == final(program, arrival_of, limits, look)


# --- whole logs


@pytest.mark.parametrize("name", ["p9-c15.log.xz"])
def test_a_capture_with_many_restarts_ends_the_same(name: str) -> None:
    lines = lzma.decompress((SEEDS / name).read_bytes()).splitlines()
    whole, pieces = Pipeline(), Pipeline()
    whole.feed(lines)
    for start in range(0, len(lines), 97):
        pieces.feed(lines[start : start + 97])
        pieces = roundtrip(pieces)
    whole.finish()
    pieces.finish()
    assert pieces.state() == whole.state()
    assert portrait(pieces) == portrait(whole)


def busy_pipeline() -> Pipeline:
    pipeline = Pipeline()
    pipeline.feed(lzma.decompress((SEEDS / "p9-c15.log.xz").read_bytes()).splitlines()[:700], Arrival(9e5, 1e9, False))
    pipeline.settle(9e5, 1e9)
    return pipeline


def test_one_saver_saves_again_and_again() -> None:
    lines = lzma.decompress((SEEDS / "p9-c15.log.xz").read_bytes()).splitlines()
    pipeline = Pipeline()
    saver = saved.Saver(pipeline)
    for start in range(0, len(lines), 300):
        pipeline.feed(lines[start : start + 300])
        assert portrait(roundtrip(pipeline, saver=saver)) == portrait(pipeline)
    # What is remembered is what is there, and no more.
    assert len(saver._memo) == sum(
        len(window.closed) for window in (pipeline._synth_window, *pipeline._gap_windows.values())
    )


# --- nothing is left out


def test_every_attribute_is_stored_or_said_not_to_be() -> None:
    pipeline = busy_pipeline()
    engine = pipeline.engine
    assert engine is not None
    parser = pipeline._parser
    for part in (
        pipeline, engine, parser, parser._torn, engine.anchor, engine.kernel, engine.ledger, engine.units,
    ):  # fmt: skip
        kind = type(part)
        assert vars(part).keys() == saved.PARTS[kind].keys() | saved.NOT_STORED[kind], kind
        assert not saved.PARTS[kind].keys() & saved.NOT_STORED[kind]
    assert saved.PARTS.keys() == saved.NOT_STORED.keys()


def test_a_type_without_a_place_in_the_table_is_refused() -> None:
    def made(hint: object) -> None:
        schema(roots=[Limits], parts={Limits: {"x": hint}}, shared=(), values=(), unchanging=(), forms={})

    made(dict[str, tuple[int, float | None]])
    for hint in (
        Callable[[], None],
        Counter,
        object,
        Any,
        Limits | Pipeline,
        dict[str, object],
        TimelineState,
        complex,
    ):
        with pytest.raises((TypeError, RecursionError)):
            made(hint)


# --- what can't be read


def test_what_another_version_stored_is_refused() -> None:
    stored = saved.Saver(busy_pipeline()).save()
    wrong: object
    for wrong in (None, [], {}, {**stored, "shape": "0" * 16}):
        with pytest.raises(ValueError, match="another version"):
            saved.load(Pipeline(), wrong)


JUNK: tuple[Any, ...] = (None, True, -1, 10**30, 1e300, "", "x", [], [None], {}, {"a": 1})


def damaged(value: Any, data: st.DataObject) -> Any:
    """The value with something else in one place."""
    what = data.draw(st.sampled_from(("deeper", "deeper", "deeper", "deeper", "junk", "shorter")))
    if isinstance(value, dict) and value and what != "junk":
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: damaged(value[key], data)}
    if isinstance(value, list) and value and what != "junk":
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], *([damaged(value[at], data)] if what == "deeper" else []), *value[at + 1 :]]
    return data.draw(st.sampled_from(JUNK))


STORED = json.loads(json.dumps(saved.Saver(busy_pipeline()).save()))


@given(st.data())
def test_nothing_but_values_of_the_right_types_is_read(data: st.DataObject) -> None:
    stored = damaged({key: value for key, value in STORED.items() if key != "shape"}, data)
    pipeline = Pipeline()
    try:
        saved.load(pipeline, {**stored, "shape": saved.SHAPE} if isinstance(stored, dict) else stored)
    except ValueError:
        return
    # It says something else, perhaps nonsense, but in the right words.
    json.dumps(saved.Saver(pipeline).save())
