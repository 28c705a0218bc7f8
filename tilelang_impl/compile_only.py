"""Compile the kernels for a card that is not here, and read off what the compilers made."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.contrib import nvcc

from flash_rosetta.backend import KernelReport
from flash_rosetta.kernels import plan_without_memory
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl.backward import plan_backward
from flash_rosetta.tilelang_impl.forward import plan_forward
from flash_rosetta.tilelang_impl.launch import Launch, cuda_target, find_nvcc


def compile_only(
    problem: Problem,
    forward: Callable[..., Any] = plan_forward,
    backward: Callable[..., Any] = plan_backward,
) -> list[KernelReport]:
    """Every kernel that `problem` would launch, compiled for its target; nothing runs.

    `forward` and `backward` plan the launches, as those of the kernels that ship do.

    Strides and alignment are those of contiguous tensors. TileLang alone lowers the kernels to CUDA
    C++; the rest takes nvcc and ptxas, and is left out where they are missing. Raises what the
    compilers raise.
    """
    launches = plan_without_memory(problem, forward, backward)
    report = _assemble if find_nvcc() else _source_alone
    return [report(*_lower(launch), problem.target) for launch in launches]


def _lower(launch: Launch) -> tuple[str, int, str]:
    """A kernel's name, the bytes of shared memory that its launch asks for, and its CUDA C++."""
    target = tvm.target.Target(cuda_target(launch.recipe.target))
    configs = {key.value: value for key, value in launch.recipe.configs}
    with tvm.transform.PassContext(config=configs), target:
        artifact = tilelang.lower(launch.recipe.kernel(**launch.recipe.options), target=target)
    ((variable, function),) = artifact.device_mod.functions.items()
    return variable.name_hint, int(function.attrs["dyn_shared_memory_buf"]), artifact.kernel_source


def _source_alone(name: str, dynamic_shared: int, source: str, target: str) -> KernelReport:
    return KernelReport(name, target, None, None, dynamic_shared, source)


def _assemble(name: str, dynamic_shared: int, source: str, target: str) -> KernelReport:
    arch = cuda_target(target)["arch"]
    with tvm.target.Target(cuda_target(target)):
        ptx = nvcc.get_ptx_from_source(source, ["--use_fast_math"])
    with tempfile.TemporaryDirectory() as folder:
        ptx_file = Path(folder) / "kernel.ptx"
        ptx_file.write_text(ptx)
        ptxas = Path(nvcc.get_nvcc_compiler()).with_name("ptxas")
        command = [ptxas, "-v", f"-arch={arch}", ptx_file, "-o", ptx_file.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return KernelReport(
        kernel=name,
        target=target,
        registers=_number(r"Used (\d+) registers", said),
        spill_bytes=_number(r"(\d+) bytes spill stores", said),
        shared_bytes=dynamic_shared + _number(r"(\d+) bytes smem", said),
        assembly=ptx,
        # Such as: products run one after the other for want of registers.
        warnings=tuple(re.findall(r"Potential Performance Loss: (.*)", said)),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
