from __future__ import annotations

from pathlib import Path

import pytest

from cuzk_agent.log.patterns import is_pattern, matching

THERE = (
    "cuzk.log", "cuzk.log.1", "cuzk.log.2.gz", "cuzk.log-20261130", "cuzk-1.log", "cuzk-2.log", "cuzk-2.log.1",
    "gone.log.1", "p-1.log", "p-2.log", "p-2.log.1", "day.log", "day-20261130.log",
    "pod/cuzk/0.log", "pod/cuzk/0.log.20261130-120000",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("cuzk*", ["cuzk.log", "cuzk-1.log", "cuzk-2.log"]),
        ("p-*.log", ["p-1.log", "p-2.log"]),
        ("gone.log*", []),
        ("day*.log", ["day.log"]),
        ("**/0.log", ["pod/cuzk/0.log"]),
        ("pod/*/[0-9].log", ["pod/cuzk/0.log"]),
        ("*.gz", []),
    ],
)
def test_logs_that_match(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in THERE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "cuzk.d").mkdir()
    assert {str(path.relative_to(tmp_path)) for path in matching(tmp_path / pattern)} == set(names)


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    path = tmp_path / "cuzk[1].log"
    assert is_pattern(path)
    path.touch()
    assert not is_pattern(path)
    assert not is_pattern(tmp_path / "cuzk.log")
