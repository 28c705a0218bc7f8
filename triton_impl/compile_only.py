"""Compile the kernels for a card that is not here, and read off what the compiler made."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from flash_rosetta.backend import KernelReport
from flash_rosetta.kernels import plan_without_memory
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.backward import plan_backward
from flash_rosetta.triton_impl.forward import plan_forward


def compile_only(
    problem: Problem,
    forward: Callable[..., Any] = plan_forward,
    backward: Callable[..., Any] = plan_backward,
) -> list[KernelReport]:
    """Every kernel that `problem` would launch, compiled for its target; nothing runs.

    `forward` and `backward` plan the launches, as those of the kernels that ship do.

    Strides and alignment are those of contiguous tensors. Raises what Triton's compiler raises.
    """
    launches = plan_without_memory(problem, forward, backward)
    with _pretend_to_be(problem.target):
        return [_report(launch.compile(), problem.target) for launch in launches]


@contextmanager
def _pretend_to_be(target: str) -> Iterator[None]:
    """Let Triton's own launch path specialise and compile for `target` ("sm_90") without a GPU.

    A device number of its own per target keeps these kernels apart from those of real devices.
    """
    capability = int(target.removeprefix("sm_"))
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: -capability,
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before


def _report(kernel: CompiledKernel, target: str) -> KernelReport:
    usage = _resource_usage(kernel.asm["cubin"])
    return KernelReport(
        kernel=kernel.metadata.name,
        target=target,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        assembly=kernel.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """`cuobjdump --dump-resource-usage` of a cubin, by the cuobjdump that comes with Triton."""
    cuobjdump = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)
    }
