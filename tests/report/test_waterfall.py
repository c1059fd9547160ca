"""The page with the waterfall: complete in itself, safe whatever the log holds, and drawn by a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import struct
import zlib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cuzk_agent.report.analyze import analyze
from cuzk_agent.report.palette import BUSY, CAUSES
from cuzk_agent.report.recorder import record
from cuzk_agent.report.waterfall import Waterfall
from report.chromium import needs_chromium, shown

DATA = Path(__file__).parent.parent / "data"
HOSTILE = '</script><img src=x onerror=document.title=1><!--"\u2028\u2029\x07\\'


def page_of(log: Path) -> str:
    """The page of a log."""
    out = io.StringIO()
    waterfall = Waterfall(out, log.name)
    record([str(log)], {}, waterfall.tell)
    waterfall.close()
    return out.getvalue()


def rows_of(page: str) -> list[list[Any]]:
    """The rows of its data, as a browser finds them."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    rows: list[list[Any]] = json.loads(data)
    return rows


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A log whose job ids are hostile to HTML."""
    log = tmp_path / "<b>hostile&amp;.log"
    lines = [
        f"TIMELINE,0,SYNTH_START,{HOSTILE},partition=0",
        f"TIMELINE,9000,SYNTH_END,{HOSTILE},partition=0,synth_ms=9000",
        f"TIMELINE,9001,GPU_PICKUP,{HOSTILE},partition=0,worker=0",
        f"TIMELINE,9002,GPU_START,{HOSTILE},partition=0,worker=0",
        f"TIMELINE,12000,GPU_END,{HOSTILE},partition=0,worker=0,gpu_ms=2998",
    ]
    log.write_text("\n".join(lines), encoding="utf-8")
    return log


def test_it_needs_and_allows_nothing_else() -> None:
    page = page_of(DATA / "seeds/isolated3.log")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]|https?:|@import|\beval\b|innerHTML|insertAdjacentHTML""", page)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    directives = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert directives["default-src"] == "'none'"
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert directives[f"{element}-src"] == f"'sha256-{digest}'"


def test_it_holds_what_analyze_says() -> None:
    log = DATA / "daemon/two-gpus-mixed.log.xz"
    rows, (report, _) = rows_of(page_of(log)), analyze([str(log)])
    (engine,) = report.engines
    for name, gpu in engine.gpus.items():
        idle = dict.fromkeys(CAUSES, 0)
        for what, *row in rows:
            if what == "idle" and row[0] == name:
                idle[row[1]] += row[3] - row[2]
        assert idle == gpu.idle_ms
        assert sum(what == "gap" and row[0] == name for what, *row in rows) == gpu.gaps.count
        assert sum(what == "unit" and row[6:7] == [name] for what, *row in rows) == gpu.spans
    jobs = {row[1] for what, *row in rows if what == "job"}
    assert jobs == {job.job_id for job in engine.jobs}


def test_no_text_ends_the_data(hostile: Path) -> None:
    page = page_of(hostile)
    assert page.count("</script>") == 2
    assert "onerror" in page
    assert "<img" not in page
    assert "<!--" not in page
    assert page.isascii() or not re.search("[\u2028\u2029]", page)
    rows = rows_of(page)
    assert rows[0] == ["log", hostile.name]
    (job,) = [row[1] for what, *row in rows if what == "job"]
    assert job == HOSTILE.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x07", "\\x07")


# --- in a browser


@needs_chromium
def test_a_browser_draws_it(tmp_path: Path) -> None:
    log = DATA / "seeds/p9-c15.log.xz"
    page = tmp_path / "page.html"
    page.write_text(page_of(log), encoding="utf-8")
    document, picture = shown(page.as_uri(), tmp_path)
    assert 'data-drawn="15"' in document
    assert len(re.findall(r'<button type="button"', document)) == 15
    assert "15 of 15 jobs proved · 150 units" in document
    (engine,) = analyze([str(log)])[0].engines
    busy, starved = engine.gpus["unknown"].busy_ms, engine.gpus["unknown"].idle_ms[next(iter(CAUSES))]
    share = f"{100 * busy / (engine.end_ms - engine.start_ms):.1f}"
    assert re.search(rf"busy<b>{share} % · {busy / 1000:.1f} s</b>", document)
    assert f"{starved / 1000:.1f} s</b>" in document
    colours = pixels(picture)
    for colour in (BUSY, *(CAUSES[cause] for cause in CAUSES if cause in ("starved", "fill"))):
        assert colours.get(bytes.fromhex(colour.rgb[1:]), 0) > 1000
    assert len(colours) > 50


@needs_chromium
def test_a_browser_takes_hostile_text_for_text(hostile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(page_of(hostile), encoding="utf-8")
    document, _ = shown(page.as_uri(), tmp_path)
    assert f"<title>{html.escape(hostile.name, quote=False)}: waterfall</title>" in document
    assert 'data-drawn="1"' in document
    assert "&lt;/script&gt;&lt;img src=x" in document
    assert "<img" not in document
    assert f'<h1 id="title">{html.escape(hostile.name)}</h1>' in document


@needs_chromium
@pytest.mark.parametrize("lines", ["", "hello\n", "TIMELINE,5,SYNTH_START,a,partition=0\n"])
def test_a_browser_draws_what_little_there_is(lines: str, tmp_path: Path) -> None:
    log, page = tmp_path / "little.log", tmp_path / "page.html"
    log.write_text(lines, encoding="utf-8")
    page.write_text(page_of(log), encoding="utf-8")
    document, _ = shown(page.as_uri(), tmp_path)
    assert "data-drawn" in document


def pixels(png: bytes) -> dict[bytes, int]:
    """How often each colour is in a picture of 8-bit RGB or RGBA."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    size = {2: 3, 6: 4}[kind]
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += length + 12
    raw, stride = zlib.decompress(packed), width * size
    before, found = bytes(stride), dict[bytes, int]()
    for row in range(height):
        start = row * (stride + 1)
        before = unfiltered(raw[start], raw[start + 1 : start + 1 + stride], before, size)
        for pixel in range(0, stride, size):
            colour = before[pixel : pixel + 3]
            found[colour] = found.get(colour, 0) + 1
    return found


def unfiltered(how: int, line: bytes, above: bytes, size: int) -> bytes:
    """A line of a PNG as it is meant."""
    out = bytearray(line)
    for i in range(len(out)):
        left, up, corner = out[i - size] if i >= size else 0, above[i], above[i - size] if i >= size else 0
        guess = left + up - corner
        near = min((left, up, corner), key=lambda value: abs(guess - value))
        out[i] = (out[i] + (0, left, up, (left + up) // 2, near)[how]) & 255
    return bytes(out)


# --- the colours

# How colours look to the three kinds of colour-blind people: G. M. Machado et al. (2009), at full severity, linear RGB.
SIGHTS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(rgb: str, sight: str) -> tuple[float, float, float]:
    """A colour as someone sees it, where distances are about what the eye makes of them (CIE L*a*b*)."""
    linear = [(int(rgb[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in linear]
    r, g, b = (
        min(1.0, max(0.0, sum(weight * value for weight, value in zip(row, linear, strict=True))))
        for row in SIGHTS[sight]
    )
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
def test_everyone_can_tell_the_colours_apart(sight: str) -> None:
    named = {**{cause.value: colour.rgb for cause, colour in CAUSES.items()}, "busy": BUSY.rgb}
    for (one, first), (other, second) in combinations(named.items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(lab(first, sight), lab(second, sight), strict=True)) ** 0.5
        assert distance > 12, f"{one} and {other}: {distance:.0f}"
