"""One heat: every contender on the same tensors in one direction; correct before fast."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from traceback import format_exc
from typing import Any, Literal

import torch

from flash_rosetta import machine
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench import timing
from flash_rosetta.bench.contenders import Contender, Outputs, Run
from flash_rosetta.bench.judge import Judge
from flash_rosetta.bench.timing import Stopwatch
from flash_rosetta.bench.workloads import Timed, Workload, flops
from flash_rosetta.problem import Inputs

MEGABYTE = 1e6

Verdict = Literal["raced", "skipped", "wrong", "failed"]


@dataclass
class Outcome:
    """What one contender brings home from a heat: seconds per round, or why it has none.

    `info` is what goes into the record's extra_info: plain JSON values.
    """

    verdict: Verdict = "raced"
    reasons: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def leave(self, verdict: Verdict, reasons: Sequence[str]) -> None:
        self.verdict = verdict
        self.reasons = list(reasons)


def run_heat(
    workload: Workload,
    direction: Timed,
    contenders: Sequence[Contender],
    watch: Stopwatch,
    device: torch.device,
    *,
    budget: float,
    rounds: int | None = None,
) -> dict[str, Outcome]:
    """Judge, then time, every contender; outcomes by contender's name.

    `budget` is the seconds of measured time for each, `rounds` a fixed number of rounds instead.
    A contender that raises, or whose output is outside its error budget, gets no number.
    """
    problem = workload.problem_for(direction)
    inputs = workload.load(device)
    judge = Judge("forward" if direction == "forward" else "backward", inputs, problem)
    outcomes = {c.name: Outcome(info=_identity(workload, direction, c, inputs)) for c in contenders}
    runs: dict[str, Run] = {}
    for contender in contenders:
        outcome = outcomes[contender.name]
        if reasons := contender.why_not(problem):
            outcome.leave("skipped", reasons)
            continue
        try:
            run = contender.prepare(direction, inputs, problem)
            outputs, outcome.info["compile_s"] = _cold(run, device)
            if not _passes(judge, outputs, outcome):
                continue
            del outputs  # they would count as allocated before the call
            peak = watch.peak_bytes(run)
        except Unsupported as error:
            outcome.leave("skipped", error.reasons)
        except Exception:
            outcome.leave("failed", [format_exc()])
        else:
            outcome.info["peak_mb"] = None if peak is None else round(peak / MEGABYTE, 3)
            runs[contender.name] = run
    if runs:
        before = machine.sensors(device)
        timed = timing.race(runs, watch, budget=budget, rounds=rounds)
        sensed = {"before": before, "after": machine.sensors(device)}
        for name, seconds in timed.items():
            outcome = outcomes[name]
            if _passes(judge, runs[name](), outcome):  # again: a stale buffer shows only now
                outcome.seconds = [significant(s) for s in seconds]
                outcome.info |= figures(outcome.seconds, flops(problem, direction), device)
                outcome.info |= sensed
    return outcomes


def significant(x: float) -> float:
    """Seven significant digits: more than any clock here has, and few enough for small JSON."""
    return float(f"{x:.7g}")


def _identity(
    workload: Workload, direction: Timed, contender: Contender, inputs: Inputs
) -> dict[str, Any]:
    """What was computed, by whom: the part of a record that needs no measuring."""
    problem = workload.problem_for(direction)
    return {
        "backend": contender.name,
        "direction": direction,
        "workload": workload.name,
        "source": workload.source,
        "layout": contender.layout,
        "problem": problem.id,
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "is_causal": problem.is_causal,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "flops": flops(problem, direction),
        "inputs_mb": round(sum(t.nbytes for t in inputs[:3]) / MEGABYTE, 3),
    }


def _cold(run: Run, device: torch.device) -> tuple[Outputs, float]:
    """The first call's outputs, and the seconds that it took with everything it had to compile."""
    _synchronize(device)
    start = perf_counter()
    outputs = run()
    _synchronize(device)
    return outputs, round(perf_counter() - start, 4)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _passes(judge: Judge, outputs: Outputs, outcome: Outcome) -> bool:
    """Whether the outputs are right; notes the errors, and the reasons if they are not."""
    judgement = judge(outputs)
    outcome.info |= judgement.errors
    if judgement.faults:
        outcome.leave("wrong", judgement.faults)
        outcome.seconds = []
    return not judgement.faults


def figures(seconds: list[float], flops: int, device: torch.device) -> dict[str, float | None]:
    """Milliseconds and TFLOP/s; none on a CPU, whose times say nothing about a GPU kernel."""
    if device.type == "cpu":
        return dict.fromkeys(("ms", "ms_q25", "ms_q75", "tflops"))
    q25, median, q75 = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "ms": round(median * 1e3, 5),
        "ms_q25": round(q25 * 1e3, 5),
        "ms_q75": round(q75 * 1e3, 5),
        "tflops": float(f"{flops / median / 1e12:.5g}"),
    }
