"""A browser without a window, for the pages that are to be seen in one. It reaches nothing outside this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")


def command(profile: Path, *arguments: str) -> list[str]:
    """The command line of a browser with a profile of its own."""
    assert CHROMIUM is not None
    return [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}",
        *arguments,
    ]


def shown(page: str, folder: Path) -> tuple[str, bytes]:
    """The document that comes of a page's address, and a picture of it (PNG, 1600 × 900)."""
    picture = folder / "picture.png"
    budget = "--virtual-time-budget=3000"
    dumped = subprocess.run(
        command(folder / "profile", budget, "--dump-dom", page), capture_output=True, timeout=50, check=True
    )
    subprocess.run(
        command(folder / "profile", budget, "--window-size=1600,900", f"--screenshot={picture}", page),
        capture_output=True,
        timeout=50,
        check=True,
    )
    return dumped.stdout.decode(), picture.read_bytes()
