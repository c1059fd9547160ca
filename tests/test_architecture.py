"""The import directions of the house: data flows down the list of modules, and imports point up it, never back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "agent" / "cuzk_agent"

MAY_IMPORT: dict[str, set[str]] = {
    "clock": set(),
    "log": {"clock"},
    "windows": set(),
    "timeline": {"windows"},
    "gpu": {"clock", "timeline", "windows"},
    "snapshot": {"clock", "log"},
    "metrics": {"gpu", "log", "snapshot", "timeline", "windows"},
    "server": set(),
    "report": {"clock", "gpu", "log", "timeline", "windows"},
    "demo": {"clock", "gpu", "timeline"},
    "config": set(),
    "app": {"clock", "config", "demo", "gpu", "log", "metrics", "report", "server", "snapshot", "timeline", "windows"},
    "cli": {"app", "clock", "config", "demo", "report", "server"},
    "__main__": {"cli"},
    "__init__": set(),
}
"""What each part of the package may import from the others."""

ONLY_IN: dict[str, set[str]] = {
    "time": {"clock"},
    "pynvml": {"gpu"},
    "watchdog": {"log"},
    "starlette": {"server"},
    "hypercorn": {"server"},
    "prometheus_client": {"metrics"},
    "argparse": {"cli", "demo"},
}
"""Modules from outside that only these parts may import."""

PURE = ("timeline", "windows")
IMPURE_MODULES = {
    "asyncio", "concurrent", "fileinput", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "select", "selectors", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time",
}  # fmt: skip
IMPURE_NAMES = {"open", "print", "input"}
IMPURE_ATTRIBUTES = {"now", "utcnow", "today"}
"""Of `datetime` and `date`: they read a clock."""

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The part of the package that a file belongs to: its folder or its name directly below the package."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported anywhere in a file, also within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are refused by ruff"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def faults(file: Path, source: str) -> list[str]:
    """What is wrong with the imports of a file, a line each."""
    part = part_of(file)
    where = file.relative_to(PACKAGE.parent)
    tree = ast.parse(source)
    found = []
    for line, name in imported(tree):
        top, *rest = name.split(".")
        if top == "cuzk_agent":
            other = rest[0] if rest else "__init__"
            if other != part and other not in MAY_IMPORT[part]:
                found.append(f"{where}:{line}: {part} must not import cuzk_agent.{other}")
        elif part not in ONLY_IN.get(top, {part}):
            found.append(f"{where}:{line}: only {' and '.join(sorted(ONLY_IN[top]))} may import {top}")
        elif part in PURE and top in IMPURE_MODULES:
            found.append(f"{where}:{line}: {part} is pure, and must not import {top}")
    if part in PURE:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_NAMES:
                found.append(f"{where}:{node.lineno}: {part} is pure, and must not call {node.func.id}")
            if isinstance(node, ast.Attribute) and node.attr in IMPURE_ATTRIBUTES:
                found.append(f"{where}:{node.lineno}: {part} is pure, and must not call .{node.attr}")
    return found


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(PACKAGE)) for file in FILES])
def test_imports_point_up(file: Path) -> None:
    assert part_of(file) in MAY_IMPORT, f"{file.name}: a new part of the package needs its place in MAY_IMPORT"
    assert not faults(file, file.read_text(encoding="utf-8"))


def test_the_directions_have_no_circle() -> None:
    placed: set[str] = set()
    while len(placed) < len(MAY_IMPORT):
        free = {part for part, others in MAY_IMPORT.items() if part not in placed and others <= placed}
        assert free, f"a circle among {sorted(MAY_IMPORT.keys() - placed)}"
        placed |= free


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("log/files.py", "from cuzk_agent.timeline.lines import Line", "log must not import cuzk_agent.timeline"),
        ("log/files.py", "from cuzk_agent import timeline", "log must not import cuzk_agent.timeline"),
        ("log/files.py", "def f():\n    import time", "only clock may import time"),
        ("log/files.py", "from time import monotonic", "only clock may import time"),
        ("app.py", "import pynvml as nvml", "only gpu may import pynvml"),
        ("timeline/tally.py", "import os.path", "timeline is pure, and must not import os"),
        ("timeline/tally.py", "import time", "only clock may import time"),
        ("timeline/tally.py", "open('x')", "timeline is pure, and must not call open"),
        ("timeline/tally.py", "datetime.now(UTC)", "timeline is pure, and must not call .now"),
        ("windows.py", "import threading", "windows is pure, and must not import threading"),
        ("metrics.py", "import cuzk_agent.server", "metrics must not import cuzk_agent.server"),
        ("server.py", "from cuzk_agent.log import files", "server must not import cuzk_agent.log"),
        ("config.py", "from cuzk_agent.app import run", "config must not import cuzk_agent.app"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, fault: str) -> None:
    (found,) = faults(PACKAGE / file, source)
    assert found.endswith(fault)
    assert found.startswith(f"cuzk_agent/{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("timeline/tally.py", "from cuzk_agent.timeline.lines import Line\nfrom cuzk_agent.windows import Rolling"),
        ("clock.py", "import time"),
        ("gpu/nvml.py", "import pynvml"),
        ("log/files.py", "import os\nopen('x')"),
    ],
)
def test_a_right_import_is_none(file: str, source: str) -> None:
    assert faults(PACKAGE / file, source) == []
