"""Which GPU a daemon means by its ordinals.

CUDA numbers GPUs by CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES, NVML by PCI bus id. The configuration can say which is
which; else the environment of the daemon's process tells, if it can be read; else the orders are taken for the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ENVIRONMENT_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class CudaEnvironment:
    """What decides which GPUs a process sees."""

    visible_devices: str | None


def ordinals(environment: CudaEnvironment) -> dict[str, str]:
    """For each of the daemon's ordinals what it names: an NVML index or (the beginning of) a UUID.

    Empty where every GPU is visible under its own number. CUDA's default order is "fastest first"; it is that of the
    PCI bus ids among GPUs of one model, which is what a prover has.
    """
    if environment.visible_devices is None:
        return {}
    named: dict[str, str] = {}
    for ordinal, entry in enumerate(environment.visible_devices.split(",")):
        device = entry.strip()
        if not re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", device):
            # CUDA itself stops at the first entry that it doesn't know.
            break
        named[str(ordinal)] = device
    return named


def environment_of_writer(log: Path, proc: Path = Path("/proc")) -> CudaEnvironment | None:
    """The environment of the process that has this log open for writing; None if there is none that may be read.

    Only processes of the same user (or all, for root) can be looked at.
    """
    try:
        about = log.stat()
    except OSError:
        return None
    for process in _processes(proc):
        try:
            descriptors = [entry.name for entry in (process / "fd").iterdir()]
            if any(_is_open_for_writing(process, fd, (about.st_dev, about.st_ino)) for fd in descriptors):
                with (process / "environ").open("rb") as environ:
                    return _cuda_environment(environ.read(_ENVIRONMENT_MAX))
        except OSError:
            continue
    return None


def _processes(proc: Path) -> Iterator[Path]:
    own = str(os.getpid())
    yield from (entry for entry in proc.iterdir() if entry.name.isdecimal() and entry.name != own)


def _is_open_for_writing(process: Path, fd: str, identity: tuple[int, int]) -> bool:
    try:
        about = (process / "fd" / fd).stat()
        if (about.st_dev, about.st_ino) != identity:
            return False
        flags = re.search(r"^flags:\s*([0-7]+)", (process / "fdinfo" / fd).read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _cuda_environment(block: bytes) -> CudaEnvironment:
    variables: dict[str, str] = {}
    for entry in block.split(b"\0"):
        name, _, value = entry.decode("utf-8", "replace").partition("=")
        variables[name] = value
    return CudaEnvironment(variables.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True, slots=True)
class GpuNames:
    """How the GPUs are called."""

    devices: Mapping[str, str]
    """Label to device (NVML index, UUID or PCI bus id), where the label is not NVML's index."""
    by_source: Mapping[str, Mapping[str, str]]
    """For each source its ordinals that are not the label of their GPU, with the device they mean."""


def names(configured: Mapping[str, str], found: Mapping[str, Mapping[str, str]]) -> GpuNames:
    """Settles the labels from the configuration (ordinal to device), or else from what was `found` for each source.

    Where all sources mean the same by their ordinals, a GPU is called as they call it. Where they don't (each daemon
    sees only its own GPU, and calls it 0), NVML's index is the name.
    """
    if configured:
        return GpuNames(dict(configured), {})
    meanings = {frozenset(ordinals_of.items()) for ordinals_of in found.values()}
    if len(meanings) <= 1:
        agreed = dict(next(iter(meanings), frozenset()))
        return GpuNames({label: device for label, device in agreed.items() if label != device}, {})
    return GpuNames({}, {source: dict(ordinals_of) for source, ordinals_of in found.items() if ordinals_of})
