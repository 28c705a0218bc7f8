"""Variants of backends, which are no contenders of the race, judged and timed as one heat of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flash_rosetta.bench.contenders import contender
from flash_rosetta.bench.heat import Outcome, run_heat
from flash_rosetta.bench.parts import Record
from flash_rosetta.bench.timing import Stopwatch
from flash_rosetta.bench.warm import Compiled, Job
from flash_rosetta.bench.workloads import Workload
from flash_rosetta.problem import Direction, Problem

MEASURED = (
    "max_error", "rel_error", "row_error", "lse_error", "ms", "ms_q25", "ms_q75", "tflops",
)  # fmt: skip
"""What a heat's records have that a part keeps."""


def trial(
    names: Sequence[str],
    direction: Direction,
    problem: Problem,
    compiled: Mapping[Job, Compiled],
    watch: Stopwatch,
    device: torch.device,
    *,
    budget: float,
    rounds: int,
) -> dict[str, Record]:
    """By name: the verdict ("right", "wrong", "skipped", "failed"), its reasons, and MEASURED;
    `compile_s` of what was compiled beforehand.

    What failed when it was compiled beforehand is not run: here it might hang as well.
    """
    built = {
        name: compiled.get(Job(name, problem, direction), Compiled(None, None)) for name in names
    }
    outcomes = run_heat(
        Workload("trial", problem, problem.inputs),
        direction,
        [contender(name) for name in names if not built[name].error],
        watch,
        device,
        budget=budget,
        rounds=rounds,
    )
    return {
        name: {"compile_s": seconds}
        | ({"verdict": "failed", "reasons": [error]} if error else _record(outcomes[name]))
        for name, (seconds, error) in built.items()
    }


def _record(outcome: Outcome) -> Record:
    return {
        "verdict": "right" if outcome.verdict == "raced" else outcome.verdict,
        "reasons": [reason.strip().splitlines()[-1] for reason in outcome.reasons],
        **{key: outcome.info[key] for key in MEASURED if key in outcome.info},
    }
