"""The unit for systemd, and the README's way to change it: both are understood, and do what is said of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuzk_agent.cli import Exit
from e2e.support import Agent

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
UNIT = ROOT / "deploy" / "systemd" / "cuzk-agent.service"
STANDIN = ROOT / "tests" / "log" / "journalctl.py"
PROGRAM = "/opt/cuzk-agent/bin/cuzk-agent"
(DROP_IN,) = re.findall(r"^```ini\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
MAX_EXPOSURE = 25
"""In tenths, as systemd-analyze takes it. It was 21; each version of systemd weighs a little differently."""


def settings(text: str) -> dict[str, str]:
    """The last value of each."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def arguments(text: str) -> list[str]:
    """What the agent is started with."""
    program, command, *rest = shlex.split(settings(text)["ExecStart"])
    assert (program, command) == (PROGRAM, "run")
    return rest


def deploy(directory: Path, *, drop_in: str = "") -> str:
    """The unit as it would be installed, only that the program is one that exists. Returns its path."""
    unit = directory / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, sys.executable), encoding="utf-8")
    if drop_in:
        folder = directory / f"{UNIT.name}.d"
        folder.mkdir()
        (folder / "override.conf").write_text(drop_in.replace(PROGRAM, sys.executable), encoding="utf-8")
    return str(unit)


def analyze(*command: str) -> str:
    """What systemd-analyze says, which has to be content."""
    done = subprocess.run(["systemd-analyze", "--no-pager", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("drop_in", ["", DROP_IN], ids=["alone", "changed"])
def test_systemd_understands_it(drop_in: str, tmp_path: Path) -> None:
    said = analyze("verify", "--man=no", "--recursive-errors=no", deploy(tmp_path, drop_in=drop_in))
    assert UNIT.name not in said


def test_it_may_do_little(tmp_path: Path) -> None:
    analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", deploy(tmp_path))


@pytest.mark.parametrize(
    ("text", "followed"),
    [(UNIT.read_text(encoding="utf-8"), 'unit = "cuzk.service"'), (DROP_IN, 'path = "/var/log/cuzk.log"')],
    ids=["unit", "drop-in"],
)
def test_the_agent_understands_its_command(text: str, followed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cuzk_agent", "check-config", *arguments(text)],
        env={"PATH": os.environ["PATH"], "STATE_DIRECTORY": "/var/lib/cuzk-agent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert followed in done.stdout
    assert 'state = "/var/lib/cuzk-agent/agent.state"' in done.stdout


def test_a_wrong_configuration_is_not_tried_again() -> None:
    assert settings(UNIT.read_text(encoding="utf-8"))["RestartPreventExitStatus"] == str(int(Exit.USAGE))


def test_the_readme_installs_it() -> None:
    commands = re.findall(r"^ {4}(.*)$", README, re.MULTILINE)
    assert f"python3 -m venv {Path(PROGRAM).parent.parent}" in commands
    assert f"cp {UNIT.relative_to(ROOT)} /etc/systemd/system/" in commands
    assert f"systemctl enable --now {UNIT.stem}" in commands


def test_it_follows_the_journal_and_keeps_what_it_knows(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    shutil.copy(STANDIN, tmp_path / "standin.py")
    entry = {"__CURSOR": "i=1", "_SYSTEMD_UNIT": "cuzk.service", "_PID": "100", "MESSAGE": "it begins"}
    (tmp_path / "journal").write_text(json.dumps(entry) + "\n", encoding="utf-8")
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/standin.py "$@"\n', encoding="utf-8")
    journalctl.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STATE_DIRECTORY": str(state),
        # An empty variable is one that is not set.
        "CUZK_AGENT_STATE": "",
    }
    with Agent("run", *arguments(UNIT.read_text(encoding="utf-8")), environ=environ) as agent:
        agent.wait_ready()
        assert agent.page().sum("cuzk_agent_source_up", source="cuzk") == 1
        assert agent.stop() == Exit.STOPPED
        assert agent.complaints() == []
    assert (state / "agent.state").exists()
    assert "--unit=cuzk.service" in (tmp_path / "arguments").read_text(encoding="utf-8")
