"""Compiles a backend's kernels for cards that are not here, in processes of their own.

Of their own, because kernels that this process has defined for Triton's interpreter cannot be
compiled, and because a compiler that crashes should fail one test and not end the run.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager

from flash_rosetta import Compilable, KernelReport, Problem, Unsupported, registry

MAX_PROCESSES = 8


@contextmanager
def compiler_pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that compile; as many as there are cores, up to MAX_PROCESSES."""
    pool = ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, MAX_PROCESSES),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_compile_for_real,
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def compile_kernels(
    pool: ProcessPoolExecutor, backend: str, problem: Problem
) -> Future[list[KernelReport]]:
    """Start compiling; the result raises Unsupported if the backend refuses the problem."""
    return pool.submit(_compile, backend, problem)


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(backend: str, problem: Problem) -> list[KernelReport]:
    loaded = registry.get(backend)
    if not isinstance(loaded, Compilable):
        raise TypeError(f"backend {backend!r} has no compile_only")
    if reasons := loaded.why_not(problem):
        raise Unsupported(backend, reasons, problem)
    return loaded.compile_only(problem)
