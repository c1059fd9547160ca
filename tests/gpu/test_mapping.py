"""Which GPU a daemon means by its ordinals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuzk_agent.gpu.mapping import CudaEnvironment, GpuNames, environment_of_writer, names, ordinals

A = "GPU-8d3a7c1e-0000-1111-2222-333344445555"
B = "GPU-11111111-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {}),
        ("", {}),
        ("1", {"0": "1"}),
        ("2,0", {"0": "2", "1": "0"}),
        (f"{A}, {B}", {"0": A, "1": B}),
        ("0,-1,1", {"0": "0"}),
        ("1,nonsense", {"0": "1"}),
        ("MIG-8d3a7c1e-0000-1111-2222-333344445555", {"0": "MIG-8d3a7c1e-0000-1111-2222-333344445555"}),
    ],
)
def test_what_the_ordinals_name(visible: str | None, expected: dict[str, str]) -> None:
    assert ordinals(CudaEnvironment(visible)) == expected


def test_the_configuration_wins() -> None:
    assert names({"0": A}, {"prover": {"0": B}}) == GpuNames({"0": A}, {})


def test_one_meaning_for_all_sources_names_the_gpus() -> None:
    assert names({}, {"a": {"0": "1", "1": "0"}, "b": {"0": "1", "1": "0"}}) == GpuNames({"0": "1", "1": "0"}, {})


def test_nothing_found_leaves_the_index() -> None:
    assert names({}, {}) == GpuNames({}, {})
    assert names({}, {"a": {}}) == GpuNames({}, {})


def test_daemons_that_each_see_their_own_gpu_keep_the_index() -> None:
    found = {"a": {"0": "0"}, "b": {"0": "1"}}
    assert names({}, found) == GpuNames({}, found)


def test_a_daemon_that_sees_all_and_one_that_sees_its_own() -> None:
    assert names({}, {"all": {}, "one": {"0": "1"}}) == GpuNames({}, {"one": {"0": "1"}})


def test_the_environment_of_the_process_that_writes_the_log(tmp_path: Path) -> None:
    log = tmp_path / "cuzk.log"
    reader_too = log.open("ab")
    reader_too.close()
    script = "import sys; f = open(sys.argv[1], 'ab'); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(log)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1,0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"open\n"
        assert environment_of_writer(log) == CudaEnvironment("1,0")
    finally:
        writer.stdin.close()
        writer.wait()
        writer.stdout.close()
    assert environment_of_writer(log) is None


def test_a_process_that_only_reads_the_log_is_not_its_daemon(tmp_path: Path) -> None:
    log = tmp_path / "cuzk.log"
    log.touch()
    script = "import sys; f = open(sys.argv[1], 'rb'); print('open', flush=True); sys.stdin.read()"
    reader = subprocess.Popen([sys.executable, "-c", script, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == b"open\n"
        assert environment_of_writer(log) is None
    finally:
        reader.stdin.close()
        reader.wait()
        reader.stdout.close()


def test_no_log_has_no_writer(tmp_path: Path) -> None:
    assert environment_of_writer(tmp_path / "none.log") is None
