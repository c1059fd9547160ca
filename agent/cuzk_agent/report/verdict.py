"""What bounds a run, in a few sentences with the arithmetic behind them."""

from __future__ import annotations

from collections.abc import Mapping

from cuzk_agent.report.model import GpuReport, Supply, Values, Verdict, working
from cuzk_agent.report.words import duration, plural, rate, share
from cuzk_agent.timeline.state import Cause

_GPU_BOUND = 0.97
"""Logged utilization from which on it is the GPU that bounds the run."""
_FAULTS = (Cause.STARVED, Cause.BLOCKED, Cause.HANDOFF, Cause.UNKNOWN)
_FEW_SPANS = 20
_WORTH_TELLING = 0.01
_WORTH_LISTING = 0.005
_HOLLOW = 0.85
"""Kernels in less of the spans than this are worth a word."""
_SOMEBODY_ELSE = 0.003

_LEAD = {
    Cause.STARVED: "Bound by synthesis",
    Cause.BLOCKED: "Bound by what holds synthesis back",
    Cause.HANDOFF: "Bound by the hand-off",
    Cause.FILL: "Bound by the latency of single proofs",
    Cause.NO_WORK: "Bound by the work offered",
    Cause.UNKNOWN: "Not known",
}


def verdict_on(
    gpus: Mapping[str, GpuReport],
    supply: Supply,
    *,
    synth: Values,
    ready_wait: Values,
    handoff: Values,
    evidence: Mapping[str, bool],
) -> Verdict:
    """The verdict on one engine."""
    worked = working(gpus)
    spans = sum(gpu.spans for gpu in worked)
    if not evidence["spans"]:
        return Verdict(
            None,
            "Nothing can be said: this daemon writes no GPU_START and GPU_END (CUZK_DISABLE_SPLIT_PROVE=1), so that "
            "nobody knows when its GPUs work.",
        )
    if not spans:
        return Verdict(None, "Nothing can be said: no proving on a GPU was logged.")
    busy_ms = sum(gpu.busy_ms for gpu in worked)
    gap_ms = sum(gpu.gap_ms for gpu in worked)
    if busy_ms + gap_ms == 0:
        return Verdict(None, "Nothing can be said: no span is of any length.")
    by_cause_ms = {cause: sum(gpu.gap_by_cause_ms[cause] for gpu in worked) for cause in Cause}
    main = max(by_cause_ms, key=lambda cause: by_cause_ms[cause])
    utilization = busy_ms / (busy_ms + gap_ms)
    the_gpu = "the GPU" if len(worked) == 1 else f"the {len(worked)} GPUs"
    faults_ms = sum(by_cause_ms[cause] for cause in _FAULTS)
    if utilization >= _GPU_BOUND:
        bound_by = "gpu"
        told = [_gpu_bound(the_gpu, utilization, busy_ms / spans, one=len(worked) == 1)]
    elif busy_ms / (busy_ms + faults_ms) >= _GPU_BOUND and (ready_wait.mean_ms or 0) > busy_ms / spans:
        bound_by = "gpu"
        told = [_gpu_bound_in_bursts(the_gpu, synth, ready_wait), _waits(the_gpu, by_cause_ms, gap_ms, busy_ms)]
    else:
        bound_by = main.value
        told = [_bound_by(main, the_gpu, supply, synth, handoff)]
        told.append(_waits(the_gpu, by_cause_ms, gap_ms, busy_ms))
        if main is Cause.STARVED:
            told += _to_keep_up(supply, synth)
            if not evidence["jobs"]:
                told.append(
                    "The log does not tell of waiting jobs: some of this may be the latency of single proofs instead."
                )
    told += _asides(worked, busy_ms, utilization)
    if spans < _FEW_SPANS:
        told.append(f"All this from {plural(spans, 'span')} only.")
    return Verdict(bound_by, " ".join(told))


def _gpu_bound(the_gpu: str, utilization: float, span_ms: float, *, one: bool) -> str:
    was, its = ("was", "its") if one else ("were", "their")
    return (
        f"Bound by {the_gpu}, as far as the log tells: {the_gpu} {was} busy {share(utilization)} of the time between "
        f"{its} first and last span, at {duration(span_ms)} a unit. Only shorter spans or more GPUs would help."
    )


def _gpu_bound_in_bursts(the_gpu: str, synth: Values, ready_wait: Values) -> str:
    return (
        f"Bound by {the_gpu} while there was work: units that were ready waited {duration(ready_wait.mean_ms)} on "
        f"average. What is left is the first synthesis of each burst of work ({duration(synth.mean_ms)}), and no work."
    )


def _bound_by(cause: Cause, the_gpu: str, supply: Supply, synth: Values, handoff: Values) -> str:
    lead = _LEAD[cause]
    match cause:
        case Cause.STARVED:
            return f"{lead}: {_supply(the_gpu, supply, synth)}"
        case Cause.BLOCKED:
            return (
                f"{lead}: units were waiting and none was being synthesized, which is what loading an SRS, the memory "
                "budget, a batch window or the pacer do."
            )
        case Cause.HANDOFF:
            mean = f", {duration(handoff.mean_ms)} on average from pick-up to start" if handoff.count else ""
            return f"{lead}: units were ready and {the_gpu} did not start them{mean}."
        case Cause.FILL:
            return (
                f"{lead}: all the work there was was in synthesis already ({duration(synth.mean_ms)} each). More "
                "proofs at once would fill the time."
            )
        case Cause.NO_WORK:
            return f"{lead}: there was nothing to prove."
        case Cause.UNKNOWN:
            return f"{lead}: for most of the time between spans the log tells nothing of its daemon."


def _supply(the_gpu: str, supply: Supply, synth: Values) -> str:
    """Whether the CPU is too slow, or too late."""
    given, wanted = supply.units_per_s, supply.demand_per_s
    if given is None or wanted is None or supply.lanes is None:
        return f"{the_gpu} waited for units that were in synthesis."
    made = f"{rate(given)} ({supply.lanes:.1f} in synthesis at once, {duration(synth.mean_ms)} each)"
    if given < wanted:
        short = f"{1 - given / wanted:.0%}"
        return f"it gave {made}, and {the_gpu} could have taken {rate(wanted)}. Synthesis is {short} short."
    stood = f" and stood still for {duration(supply.standstill_ms)}" if supply.standstill_ms else ""
    return (
        f"it gave {made}, which is as much as {the_gpu} could take ({rate(wanted)}), but not evenly{stood}: the units "
        "came when others were ready already, and at other times there were none."
    )


def _to_keep_up(supply: Supply, synth: Values) -> list[str]:
    """What synthesis would have to be like."""
    wanted, lanes, mean_ms = supply.demand_per_s, supply.lanes, synth.mean_ms
    if wanted is None or lanes is None or not mean_ms or supply.units_per_s is None or supply.units_per_s >= wanted:
        return []
    factor = wanted / supply.units_per_s
    more, faster = f"{lanes * factor:.1f} in synthesis at once at the same speed", duration(mean_ms / factor)
    return [f"To keep up it takes {more}, or {faster} each."]


def _waits(the_gpu: str, by_cause_ms: Mapping[Cause, int], gap_ms: int, busy_ms: int) -> str:
    whole_ms = gap_ms + busy_ms
    parts = sorted((ms, cause) for cause, ms in by_cause_ms.items() if ms >= _WORTH_LISTING * gap_ms and ms)
    listed = ", ".join(f"{cause.value.replace('_', ' ')} {duration(ms)}" for ms, cause in reversed(parts))
    waited = f"{duration(gap_ms)} of {duration(whole_ms)} ({share(gap_ms / whole_ms)})"
    return f"Between spans {the_gpu} waited {waited}: {listed}."


def _asides(gpus: list[GpuReport], busy_ms: int, utilization: float) -> list[str]:
    told = []
    run_ms = sum(gpu.run_ms for gpu in gpus)
    run = sum(gpu.run_busy_ms for gpu in gpus) / run_ms if run_ms else utilization
    if utilization - run > 0.05:
        told.append(
            f"With what came before the first span and after the last, utilization over the run was {share(run)}."
        )
    occupied = [gpu.chip for gpu in gpus if gpu.chip is not None and gpu.chip.span_sampled_ms]
    if occupied:
        occupancy = sum(chip.span_busy_ms for chip in occupied) / sum(chip.span_sampled_ms for chip in occupied)
        if occupancy < _HOLLOW:
            told.append(f"Busy on the log is not busy on the chip: in spans it was {share(occupancy)} busy.")
    elif known := [gpu for gpu in gpus if gpu.kernel_utilization is not None and gpu.busy_ms]:
        filled = sum(gpu.kernel_ms or 0 for gpu in known) / sum(gpu.busy_ms for gpu in known)
        if filled < _HOLLOW:
            told.append(f"Busy on the log is not busy on the chip: kernels ran in {share(filled)} of the busy time.")
    unlogged_ms = sum(gpu.chip.unlogged_busy_ms for gpu in gpus if gpu.chip is not None)
    sampled_ms = sum(gpu.chip.sampled_ms for gpu in gpus if gpu.chip is not None)
    if sampled_ms and unlogged_ms / sampled_ms >= _SOMEBODY_ELSE:
        told.append(f"Outside of all spans a chip was busy for {duration(unlogged_ms)}: somebody else is on it.")
    wasted_ms = sum(sum(gpu.wasted_ms.values()) for gpu in gpus)
    if busy_ms and wasted_ms / busy_ms >= _WORTH_TELLING:
        wasted = f"{duration(wasted_ms)} of the busy time ({share(wasted_ms / busy_ms)})"
        told.append(f"{wasted} went into jobs that failed or ran twice.")
    return told
