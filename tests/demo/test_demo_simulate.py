"""`cuzk-agent simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest

from cuzk_agent.cli import Exit, main
from cuzk_agent.demo.scenario import SCENARIOS


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_writes_a_log_its_truth_and_what_nvml_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, truth, nvml = (tmp_path / name for name in ("a.log", "a.json", "a.nvml.jsonl"))
    arguments = ["--scenario", "starved", "--seed", "3", "--truth", str(truth), "--nvml", str(nvml)]
    assert main(["simulate", *arguments, "-o", str(log)]) == Exit.STOPPED
    told = json.loads(truth.read_text())
    assert told["lines"] == log.read_bytes().count(b"\n")
    assert capsys.readouterr().err == f"{log}: {told['lines']} lines, of which {told['torn']} torn\n"
    gpu = told["gpus"]["0"]
    assert gpu["gap_ms"] == sum(gap["end_ms"] - gap["start_ms"] for gap in gpu["gaps"])
    assert len(told["kernels"]) == gpu["spans"] == told["units"]["proved"]
    assert len(nvml.read_text().splitlines()) > 100
    assert files(tmp_path) == ["a.json", "a.log", "a.nvml.jsonl"]

    again = tmp_path / "b.log"
    assert main(["simulate", "--scenario", "starved", "--seed", "3", "--output", str(again)]) == Exit.STOPPED
    assert again.read_bytes() == log.read_bytes()


def test_it_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, truth = tmp_path / "a.log", tmp_path / "a.json"
    truth.write_text("mine")
    assert main(["simulate", "-o", str(log), "--truth", str(truth)]) == Exit.USAGE
    assert capsys.readouterr().err == f"cuzk-agent: already there: {truth}\n"
    assert truth.read_text() == "mine"
    assert files(tmp_path) == ["a.json"]


def test_it_leaves_nothing_behind_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    others = tmp_path / "x.gpu7.nvml.jsonl"
    others.write_text("another simulation's")
    monkeypatch.setattr("json.dumps", interrupted)
    arguments = ["--truth", str(tmp_path / "x.json"), "--nvml", str(tmp_path / "y.nvml.jsonl"), "--lines", "200"]
    assert main(["simulate", "-o", str(tmp_path / "x.log"), *arguments]) == Exit.STOPPED
    assert files(tmp_path) == ["x.gpu7.nvml.jsonl"]


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-o", str(tmp_path / "no" / "a.log")]) == Exit.USAGE
    assert "No such file or directory" in capsys.readouterr().err


def test_many_lines_are_written_fast(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    begun_s = perf_counter()
    assert main(["simulate", "--scenario", "two-gpus", "--lines", "50000", "-o", str(log)]) == Exit.STOPPED
    # A million in a minute, on a machine that has other things to do as well.
    assert perf_counter() - begun_s < 3
    assert log.read_bytes().count(b"\n") == pytest.approx(50_000, abs=20)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_help_names_every_scenario(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("lines", ["0", "-1", "many"])
def test_a_number_of_lines_that_is_none(lines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "-o", str(tmp_path / "a.log"), "--lines", lines])
    assert "--lines" in capsys.readouterr().err
