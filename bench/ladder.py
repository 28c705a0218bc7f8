"""The ladder: each optimisation as a kernel of its own, in every language, on one card.

The rungs are those of `flash_rosetta.variants`. All rungs of a direction and all backends race on
the same tensors, interleaved, each judged before it is timed. What rounding P costs in accuracy is
measured on small problems, where the oracle judges every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flash_rosetta import registry
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.judge import Judge
from flash_rosetta.bench.ladder_page import sections
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.timing import Stopwatch
from flash_rosetta.bench.trial import trial
from flash_rosetta.bench.warm import Compiled, Job, compile_all
from flash_rosetta.bench.workloads import HIDDEN, TOKENS
from flash_rosetta.problem import DTYPE_NAMES, Direction, Problem, target_of
from flash_rosetta.variants import RUNGS, SEPARATOR, Varied

__all__ = ["measure", "sections"]

SEQLEN = 4096
ROUNDS = 20
BEFORE_CAST, AFTER_CAST = "exp2", "cast"
PEAKED = 8.0
"""By this the queries of peaked inputs are multiplied: few keys then have all the weight."""


@dataclass(frozen=True)
class Climber:
    """One rung of one backend."""

    backend: str
    rung: str

    @property
    def name(self) -> str:
        return f"{self.backend}{SEPARATOR}{self.rung}"


def measure(lab: Lab) -> list[Record]:
    """Every rung of every backend that has them: what it reaches, and how exact it is."""
    posed = list(_problems(lab))
    climbers = {
        direction: [
            Climber(name, rung.name)
            for name in varied(lab)
            for rung in RUNGS
            if rung.direction == direction
        ]
        for direction in ("forward", "backward")
    }
    compiled = compile_all(
        [
            Job(climber.name, problem, direction)
            for direction, problem in posed
            for climber in climbers[direction]
            if not registry.why_not(climber.name, problem)
        ],
        lab,
    )
    watch = lab.watch
    records: list[Record] = []
    for direction, problem in lab.track(posed, "ladder"):
        records += _climb(lab, watch, direction, problem, climbers[direction], compiled)
    hung = {job.contender for job, outcome in compiled.items() if outcome.error}
    for problem, peak in lab.track(list(_accuracy_problems(lab)), "accuracy"):
        for climber in climbers["forward"]:
            if climber.rung in (BEFORE_CAST, AFTER_CAST) and climber.name not in hung:
                records.append(_exactness(lab, climber, problem, peak))
    return records


def varied(lab: Lab) -> list[str]:
    """The backends to measure: those named, or all that have variants and can be loaded."""
    found = []
    for name in lab.backends or registry.names():
        try:
            if isinstance(registry.get(name), Varied):
                found.append(name)
        except Unsupported:
            continue
    return found


def _problems(lab: Lab) -> Iterator[tuple[Direction, Problem]]:
    """head_dim 64 and 128, full and causal, 16k tokens in bf16; on a CPU one that is tiny."""
    directions: tuple[Direction, Direction] = ("forward", "backward")
    for direction in directions:
        needs_backward = direction == "backward"
        if lab.device.type == "cpu":
            yield direction, Problem(
                batch=1, num_heads=1, seqlen_q=40, head_dim=16, is_causal=True,
                dtype=torch.float16, needs_backward=needs_backward,
            )  # fmt: skip
            continue
        for head_dim in (64, 128):
            for is_causal in (False, True):
                if lab.is_quick and (head_dim, is_causal) != (64, True):
                    continue
                yield direction, Problem(
                    batch=TOKENS // SEQLEN, num_heads=HIDDEN // head_dim, seqlen_q=SEQLEN,
                    head_dim=head_dim, is_causal=is_causal, target=target_of(lab.device),
                    needs_backward=needs_backward,
                )  # fmt: skip


def _climb(
    lab: Lab,
    watch: Stopwatch,
    direction: Direction,
    problem: Problem,
    climbers: list[Climber],
    compiled: dict[Job, Compiled],
) -> list[Record]:
    """Judge and time all rungs on one problem."""
    names = [climber.name for climber in climbers]
    tried = trial(
        names, direction, problem, compiled, watch, lab.device, budget=0.25, rounds=ROUNDS
    )
    return [
        {
            "kind": "speed",
            **_identity(climber, problem),
            "direction": direction,
            **tried[climber.name],
        }
        for climber in climbers
    ]


def _accuracy_problems(lab: Lab) -> Iterator[tuple[Problem, float]]:
    """Small ones in fp16 and bf16, standard normal and peaked; Triton's interpreter has no bf16."""
    dtypes = (torch.float16,) if lab.device.type == "cpu" else (torch.float16, torch.bfloat16)
    seqlen = 64 if lab.device.type == "cpu" else 1024
    for dtype in dtypes:
        for peak in (1.0, PEAKED):
            yield Problem(
                batch=1, num_heads=1 if lab.device.type == "cpu" else 3, seqlen_q=seqlen,
                head_dim=64, dtype=dtype, target=target_of(lab.device),
            ), peak  # fmt: skip


def _exactness(lab: Lab, climber: Climber, problem: Problem, peak: float) -> Record:
    inputs = problem.inputs(lab.device)
    inputs = inputs._replace(q=inputs.q * peak)
    record: Record = {
        "kind": "accuracy",
        **_identity(climber, problem),
        "direction": "forward",
        "inputs": "peaked" if peak > 1 else "normal",
    }
    if reasons := registry.why_not(climber.name, problem):
        return record | {"verdict": "skipped", "reasons": reasons}
    try:
        outputs = registry.get(climber.name).forward(*inputs[:3], problem)
        judgement = Judge("forward", inputs, problem)(outputs)
    except Exception as error:
        return record | {"verdict": "failed", "reasons": [f"{type(error).__name__}: {error}"]}
    verdict = "wrong" if judgement.faults else "right"
    return record | {"verdict": verdict, "reasons": judgement.faults, **judgement.errors}


def _identity(climber: Climber, problem: Problem) -> Record:
    return {
        "backend": climber.backend,
        "rung": climber.rung,
        "problem": replace(problem, needs_backward=False).id,
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "head_dim": problem.head_dim,
        "is_causal": problem.is_causal,
        "dtype": DTYPE_NAMES[problem.dtype],
    }
