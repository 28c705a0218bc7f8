"""Compile many kernels at once, each in a process of its own, into the caches on disk.

A DSL compiles for seconds, on one core, when a problem is first asked for. What is to be timed
together is compiled together beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

import torch

from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.contenders import contender
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.workloads import Timed
from flash_rosetta.problem import Problem

PATIENCE, PATIENCE_EACH = 60.0, 15.0
"""Seconds for all jobs together, and more for each that a process has to do: what has not come by
then is taken to hang, and its process is ended."""


COMPILED_FOR_A_SHAPE = ("flex",)
"""Contenders that compile anew for another batch."""


class Job(NamedTuple):
    """One direction of one problem on one contender of the race."""

    contender: str
    problem: Problem
    direction: Timed


class Compiled(NamedTuple):
    """Seconds that the first call took longer than the second, or why there was none."""

    seconds: float | None
    error: str | None


def compile_all(jobs: Sequence[Job], lab: Lab, processes: int | None = None) -> dict[Job, Compiled]:
    """Run each job twice on a batch of 1, in `processes` (the cores, if left out) at a time.

    What fails is told in its `Compiled`, and stops nothing else. Jobs share the machine's cores, so
    that a time says what it cost here, among the others, and not what it would cost alone.
    """
    todo = list(dict.fromkeys(jobs))
    found: dict[Job, Compiled] = {}
    if not todo:
        return found
    workers = min(processes or os.cpu_count() or 1, len(todo))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        pending = {pool.submit(_first_call, job, str(lab.device)): job for job in todo}
        deadline = PATIENCE + PATIENCE_EACH * -(-len(todo) // workers)
        try:
            for future in lab.track(as_completed(pending, timeout=deadline), "compile", len(todo)):
                found[pending[future]] = _outcome(future)
        except TimeoutError:
            for process in pool._processes.values():  # no public way to end one that hangs
                process.kill()
    for job in todo:
        found.setdefault(job, Compiled(None, f"took longer than {deadline:.0f} s"))
    return found


def _outcome(future: Future[float]) -> Compiled:
    try:
        return Compiled(round(future.result(), 2), None)
    except Unsupported as error:
        return Compiled(None, "; ".join(error.reasons))
    except Exception as error:  # a compiler's, of any kind, or a process that it took along
        return Compiled(None, f"{type(error).__name__}: {error}".splitlines()[0])


def _first_call(job: Job, device: str) -> float:
    runner = contender(job.contender)
    problem = replace(job.problem, needs_backward=job.direction != "forward")
    if job.contender not in COMPILED_FOR_A_SHAPE:
        problem = replace(problem, batch=1)
    if reasons := runner.why_not(problem):
        raise Unsupported(job.contender, reasons, problem)
    inputs = problem.inputs(device)

    def call() -> float:
        start = perf_counter()
        runner.prepare(job.direction, inputs, problem)()
        if inputs.q.is_cuda:
            torch.cuda.synchronize()
        return perf_counter() - start

    first = call()
    return max(0.0, first - call())
