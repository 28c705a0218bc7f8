"""Compile the kernels for a card that is not here, and read off what the compilers made."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from flash_rosetta.backend import KernelReport
from flash_rosetta.cute_impl.backward import plan_backward
from flash_rosetta.cute_impl.forward import plan_forward
from flash_rosetta.cute_impl.launch import Recipe, build
from flash_rosetta.kernels import plan_without_memory
from flash_rosetta.problem import Problem


def compile_only(
    problem: Problem,
    forward: Callable[..., Any] = plan_forward,
    backward: Callable[..., Any] = plan_backward,
) -> list[KernelReport]:
    """Every kernel that the plans launch for `problem`, compiled for its target; nothing runs.

    `forward` and `backward` plan the launches, as those of the kernels that ship do.

    Strides and alignment are those of contiguous tensors. The assembly is PTX, and SASS after it
    where some nvdisasm is found. Raises what the compilers raise.
    """
    launches = plan_without_memory(problem, forward, backward)
    return [report(launch.recipe) for launch in launches]


def report(recipe: Recipe) -> KernelReport:
    """What the compilers make of one kernel."""
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()) as said:
        flags = f"--keep-ptx --keep-cubin --dump-dir {shlex.quote(folder)} remarks{{ptx}}"
        code = build(recipe.kernel, recipe.target, recipe.options, flags)
        ptx, cubin = code.__ptx__, code.__cubin__
        sass = _disassemble(cubin, Path(folder))
    remarks = said.getvalue()
    return KernelReport(
        kernel=recipe.kernel.__name__.lower(),
        target=recipe.target,
        registers=_number(r"Used (\d+) registers", remarks),
        spill_bytes=_number(r"(\d+) bytes stack frame", remarks),
        shared_bytes=_dynamic_shared(code) + _number(r"(\d+) bytes smem", remarks, missing=0),
        assembly=ptx + sass,
        # Such as: products run one after the other, or all threads keep the same registers.
        warnings=tuple(re.findall(r"Potential Performance Loss: (.*)", remarks)),
    )


def _dynamic_shared(code: Any) -> int:
    """The bytes of shared memory that a kernel's launch asks for, from the launch's own code.

    It fills a structure of CUDA's for the launch, in which they are the third field.
    """
    text = str(code.ir_module)
    field = re.search(
        r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, .*\n"
        r" *llvm\.store (%\d+), \1 : i64",
        text,
    )
    if field is None:
        raise ValueError("the launch says nowhere how much shared memory it asks for")
    before = text[: field.start()]
    constants = re.findall(rf" {field[2]} = llvm\.mlir\.constant\((\d+) : i64\)", before)
    return int(constants[-1])


def _number(pattern: str, text: str, missing: int | None = None) -> int:
    match = re.search(pattern, text)
    if match is None and missing is None:
        raise ValueError(f"no {pattern} in what ptxas said: {text!r}")
    return int(match[1]) if match else missing


def _disassemble(cubin: bytes, folder: Path) -> str:
    """SASS, by the first nvdisasm that knows the format; empty if none does."""
    file = folder / "disassemble.cubin"
    file.write_bytes(cubin)
    for nvdisasm in _disassemblers():
        done = subprocess.run([nvdisasm, "-c", file], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
    return ""


def _disassemblers() -> Iterator[Path]:
    """What may be here: nvidia-cutlass-dsl-libs-base[sass] brings one, Triton another, or CUDA."""
    for package, inside in (
        ("nvidia.cuda_nvdisasm", "bin"),
        ("nvidia.cu13", "bin"),
        ("triton", "backends/nvidia/bin"),
    ):
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:  # of the package around it
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / inside / "nvdisasm").exists():
                yield path
    if found := shutil.which("nvdisasm"):
        yield Path(found)
