"""How long the first call takes: compiled anew, and from the caches on disk.

Each contender starts in a process of its own, first with all caches empty, then again with what
that left. What is counted begins before the backend is imported and ends when the result is there;
importing PyTorch and starting the GPU come before. Contenders start side by side, two cores for
each: they compile for seconds, on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flash_rosetta import registry
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.contenders import OTHERS, contender
from flash_rosetta.bench.page import Section, Table, Text
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.warm import SWITCHES
from flash_rosetta.problem import Problem, target_of

__all__ = ["measure", "sections"]

TIMEOUT = 180.0
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASH_ROSETTA_CACHE_DIR": "flash-rosetta",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn-4",
    "CUDA_CACHE_PATH": "cuda",
}
"""The variables that say where each compiler keeps what it has made."""

DIRECTIONS = ("forward", "backward")


def measure(lab: Lab) -> list[Record]:
    """A record for each contender: seconds to the first forward and the first backward."""
    problem = _problem(lab.device)
    names = list(lab.backends) or _names(problem)
    with ThreadPoolExecutor(max(1, min(len(names), (os.cpu_count() or 1) // 2))) as pool:
        started = pool.map(lambda name: _record(name, lab.device, problem), names)
        return list(lab.track(started, "startup", len(names)))


def _record(name: str, device: torch.device, problem: Problem) -> Record:
    record: Record = {"backend": name, "problem": problem.id, "verdict": "started"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for state in ("cold", "warm"):
                record[state] = _start(name, device, Path(folder))
        except (ValueError, subprocess.SubprocessError) as error:
            record |= {"verdict": "failed", "reasons": [str(error)]}
    return record


def _problem(device: torch.device) -> Problem:
    is_gpu = device.type == "cuda"
    return Problem(
        batch=1,
        num_heads=2,
        seqlen_q=1024 if is_gpu else 64,
        head_dim=128 if is_gpu else 16,
        is_causal=True,
        dtype=torch.bfloat16 if is_gpu else torch.float16,
        target=target_of(device),
        needs_backward=True,
    )


def _names(problem: Problem) -> list[str]:
    backends = [name for name in registry.names() if name not in registry.ONLY_BY_NAME]
    return [name for name in (*backends, *OTHERS) if not contender(name).why_not(problem)]


def _start(name: str, device: torch.device, caches: Path) -> dict[str, float]:
    """Seconds by direction, in a new process."""
    environment = os.environ | SWITCHES
    environment |= {variable: str(caches / folder) for variable, folder in CACHES.items()}
    command = [sys.executable, "-m", "flash_rosetta.bench.startup", name, str(device)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ValueError(f"{name} did not start: {said[-1] if said else done.returncode}")
    seconds: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def start(name: str, device: torch.device) -> dict[str, float]:
    """What a new process does: the first forward, then the first backward."""
    torch.zeros(1, device=device)  # the GPU's own start is not the backend's
    problem = _problem(device)
    seconds = {}
    inputs = problem.inputs(device)
    begin = perf_counter()
    runner = contender(name)
    if reasons := runner.why_not(problem):
        raise Unsupported(name, reasons, problem)
    for direction in DIRECTIONS:
        runner.prepare(direction, inputs, problem)()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[direction] = round(perf_counter() - begin, 3)
        begin = perf_counter()
    return seconds


def sections(part: dict[str, Any], card: dict[str, Any]) -> list[Section]:
    """A table of seconds."""
    started = [r for r in part["records"] if r["verdict"] == "started"]
    rows = [
        [
            f"`{record['backend']}`",
            *(f"{record[state][d]:.2f}" for d in DIRECTIONS for state in ("cold", "warm")),
        ]
        for record in started
    ]
    header = ["", *(f"{d}, {state}" for d in DIRECTIONS for state in ("cold", "warm"))]
    failed = [
        Text(f"`{r['backend']}` failed: {'; '.join(r['reasons'])}")
        for r in part["records"]
        if r["verdict"] == "failed"
    ]
    return [
        Section(
            "The first call",
            (
                Text(
                    "Seconds from importing a backend to its first result, in a new process: with "
                    "nothing compiled before (cold), and with what an earlier process left on disk "
                    "(warm). The backward is counted from the end of the forward. Bf16, head_dim "
                    "128, causal."
                ),
                Table(header, rows),
                *failed,
            ),
        )
    ]


if __name__ == "__main__":
    print(json.dumps(start(sys.argv[1], torch.device(sys.argv[2]))))
