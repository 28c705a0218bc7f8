"""Compile many kernels at once, each in a process of its own, into the caches on disk.

A DSL compiles for seconds, on one core, when a problem is first asked for. What is to be timed
together is compiled together beforehand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

import torch

from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.contenders import contender
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.workloads import Timed
from flash_rosetta.problem import Problem

PATIENCE = 120.0
"""Seconds, the start of a process included, after which a job is taken to hang."""

GRACE = 2.0
"""Seconds that a process has to end by itself."""

COMPILED_FOR_A_SHAPE = ("flex",)
"""Contenders that compile anew for another batch."""

SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""Caches on disk that are there only when asked for, before the contender is imported."""


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
    asked: dict[Job, list[Job]] = {}
    for job in jobs:
        asked.setdefault(_smallest(job), []).append(job)
    found: dict[Job, Compiled] = {}
    if not asked:
        return found
    count = min(processes or os.cpu_count() or 1, len(asked))
    workers = [Worker(lab.device) for _ in range(count)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(job: Job) -> Compiled:
        worker = idle.get()
        try:
            return worker.run(job)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(count) as pool:
        pending = {pool.submit(run, job): job for job in _apart(asked)}
        try:
            for future in lab.track(as_completed(pending), "compile", len(asked)):
                found |= dict.fromkeys(asked[pending[future]], future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.dismiss()
            for worker in workers:
                worker.end()
    return found


class Worker:
    """A process that runs one job after another.

    After a job that failed a new one takes its place, as the old one may have lost its device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.process: SpawnProcess | None = None

    def run(self, job: Job) -> Compiled:
        if self.process is None:
            self._start()
        try:
            self.pipe.send(job)
            if self.pipe.poll(PATIENCE):
                outcome: Compiled = self.pipe.recv()
            else:
                outcome = Compiled(None, f"took longer than {PATIENCE:.0f} s")
        except (EOFError, OSError):
            outcome = Compiled(None, "it ended the process that it ran in")
        if outcome.error:
            self.end()
        return outcome

    def dismiss(self) -> None:
        """Let the process end when it has no job any more."""
        if self.process is not None:
            self.pipe.close()

    def end(self) -> None:
        """See to it that there is no process any more."""
        self.dismiss()
        if self.process is not None:
            self.process.join(GRACE)
            self.process.kill()
            self.process.join()
            self.process = None

    def _start(self) -> None:
        spawn = get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, str(self.device)))
        self.process.start()
        theirs.close()  # else its end would go unseen here


def serve(pipe: Connection, device: str) -> None:
    """What a worker's process does, until nobody is at the other end."""
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_outcome(pipe.recv(), device))


def _smallest(job: Job) -> Job:
    """What is run for a job: other batches have the same kernels."""
    problem = replace(job.problem, needs_backward=job.direction != "forward")
    if job.contender not in COMPILED_FOR_A_SHAPE:
        problem = replace(problem, batch=1)
    return job._replace(problem=problem)


def _apart(jobs: Iterable[Job]) -> list[Job]:
    """In an order in which jobs of one kernel come late after each other, and find it compiled."""
    met: Counter[tuple] = Counter()

    def turn(job: Job) -> int:
        p = job.problem
        kernel = job.contender, job.direction, p.head_dim, p.head_dim_v, p.is_causal, p.dtype
        met[kernel] += 1
        return met[kernel]

    return sorted(jobs, key=turn)


def _outcome(job: Job, device: str) -> Compiled:
    try:
        return Compiled(round(_first_call(job, device), 2), None)
    except Unsupported as error:
        return Compiled(None, "; ".join(error.reasons))
    except Exception as error:  # a compiler's, of any kind
        return Compiled(None, f"{type(error).__name__}: {error}".splitlines()[0])


def _first_call(job: Job, device: str) -> float:
    runner = contender(job.contender)
    if reasons := runner.why_not(job.problem):
        raise Unsupported(job.contender, reasons, job.problem)
    inputs = job.problem.inputs(device)

    def call() -> float:
        start = perf_counter()
        runner.prepare(job.direction, inputs, job.problem)()
        if inputs.q.is_cuda:
            torch.cuda.synchronize()
        return perf_counter() - start

    first = call()
    return max(0.0, first - call())
