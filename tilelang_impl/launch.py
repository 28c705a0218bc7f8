"""A kernel launch as data, so that one description can be run, or only compiled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang
import torch
from tilelang import PassConfigKey

from flash_rosetta.problem import Problem

MAX_COMPILED = 1024
_thread = threading.local()

logging.getLogger("tilelang").setLevel(logging.WARNING)  # else a line for each compilation

PASS_CONFIGS = {
    # exp2 becomes one instruction. Divisions are approximate: forward.py and backward.py have none
    # that matters below fp32's rounding.
    PassConfigKey.TL_ENABLE_FAST_MATH: True,
    # The kernels say themselves who loads, who waits and where threads meet. What the compiler
    # would insert is wrong around products that are still running, or costs time.
    PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One TileLang kernel, the card it is compiled for, its compile-time options, its arguments.

    `kernel(**options)` makes the TileLang program. All sizes and strides are arguments of the
    compiled code, so launches with equal kernel, target and options share it.
    """

    kernel: Callable[..., Any]
    target: str
    options: dict[str, Any]
    args: tuple

    def run(self) -> None:
        """Enqueue on the current stream of the current device."""
        if not getattr(_thread, "bound", False):
            # PyTorch makes CUDA's context current at its first call of CUDA, which may come after
            # ours, and in a thread without one tensors cannot be described to the copy engine.
            torch.cuda.set_device(torch.cuda.current_device())
            _thread.bound = True
        compiled(self.kernel, self.target, **self.options)(*self.args)


@lru_cache(maxsize=MAX_COMPILED)
def compiled(kernel: Callable[..., Any], target: str, **options: Any) -> Callable[..., None]:
    """The code of a kernel for a card, from memory, from TileLang's cache on disk, or compiled."""
    return tilelang.compile(
        kernel(**options),
        target=cuda_target(target),
        pass_configs=PASS_CONFIGS,
        execution_backend="tvm_ffi",
    )


def cuda_target(target: str) -> dict[str, str]:
    """What TileLang calls a problem's target: "sm_90" is compiled for all of Hopper, as sm_90a."""
    return {"kind": "cuda", "arch": f"{target}a" if int(target[3:]) >= 90 else target}


def on_hopper(problem: Problem) -> bool:
    """Whether kernels may use what sm_90 alone has: asynchronous products of a warpgroup."""
    return problem.target == "sm_90"
