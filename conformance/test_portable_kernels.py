"""The portable kernels of the CuTe DSL backend: one table of tiles for every card from sm_80 on.

They run fp32, and what Hopper's copy engine cannot take, so their code is looked for on sm_90 too.
Nothing here runs a kernel.
"""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_rosetta import KernelReport, Problem, registry
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool
from flash_rosetta.layout import Layout

pytest.importorskip("cutlass.cute", exc_type=ImportError)

SHARED_BYTES = 99 * 1024
"""What a block may take where it is scarcest: sm_86, sm_89, sm_120."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = FP16, FP32
"""One of each operand width."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """Some files of the backend's folder, by name."""
    folder = type(registry.get("cute")).__module__.rpartition(".")[0]
    return {name: sys.modules[f"{folder}.{name}"] for name in ("portable_tiling", "tiles")}


def _problem(head_dim: int, dtype: torch.dtype, target: str = "sm_90", **changes: Any) -> Problem:
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 1000, "needs_backward": True}
    return Problem(head_dim=head_dim, dtype=dtype, target=target, **sizes | changes)


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_fit_threads_and_shared_memory(modules, width, dtype, vector):
    """Loops over a tile's rows would leave some out in silence."""
    tiles = modules["tiles"].portable_tiles_for(_problem(width, dtype), vector)
    for name in ("forward", "dkdv", "dq"):
        tile = getattr(tiles, name)
        own, visited = tile.tile_q, tile.tile_k
        if name == "dkdv":
            own, visited = visited, own
        threads = 32 * tile.warps * tile.column_groups
        assert threads % 64 == 0, name  # 8 threads copy a row, each of them rows that are 8 n apart
        for rows in (own, visited):
            assert rows % (threads // 8) == 0, name
            assert rows * width % (8 * threads) == 0, name
        assert own % (16 * tile.warps) == 0, name
        assert visited % 16 == 0, name
        assert width // tile.column_groups % 16 == 0, name
        own_tiles, statistics = 1, 0
        if name != "forward":
            assert 128 % tile.tile_q == 0, name  # the padding of the row statistics
            own_tiles = 2
        if name == "dkdv":
            assert 2 * tile.tile_q // 4 <= threads, name  # which copy them, four numbers each
            statistics = 8 * tile.num_stages * tile.tile_q
        rows = own_tiles * own + 2 * tile.num_stages * visited
        assert rows * width * dtype.itemsize + statistics <= SHARED_BYTES, name


@pytest.mark.parametrize(
    ("changes", "layout", "expected"),
    [
        ({}, {}, True),
        ({"head_dim": 40}, {"stride": (16000, 4000, 40, 1)}, True),
        ({}, {"stride": (0, 0, 0, 1)}, True),
        ({}, {"shape": (1, 4, 100, 64), "stride": (7, 6400, 64, 1)}, True),
        ({}, {"stride": (25601, 6400, 64, 1)}, False),
        ({}, {"stride": (26000, 6500, 65, 1)}, False),
        ({}, {"stride": (25600, 6400, 1, 100)}, False),
        ({}, {"stride": (0, 0, 0, 0)}, False),
        ({}, {"misalignment": 2}, False),
        ({"head_dim": 33}, {"stride": (25600, 6400, 64, 1)}, False),
        ({"head_dim": 36, "dtype": FP32}, {"stride": (14400, 3600, 36, 1)}, True),
        ({"head_dim": 36, "dtype": FP16}, {"stride": (14400, 3600, 36, 1)}, False),
    ],
    ids=str,
)
def test_copies_of_16_bytes_only_where_they_are_aligned(modules, changes, layout, expected):
    problem = _problem(**{"head_dim": 64, "dtype": FP16} | changes)
    shape = torch.Size(layout.pop("shape", (2, 4, 100, problem.head_dim)))
    x = Layout(shape, **{"stride": (25600, 6400, 64, 1), "misalignment": 0} | layout)
    aligned = Layout(shape, (25600, 6400, 64, 1), 0)
    for inputs in ((x,), (x, aligned), (aligned, x)):
        assert modules["portable_tiling"].can_use_vectors(problem, *inputs) == expected


PROBLEMS = [
    _problem(128, FP16, "sm_80", is_causal=True),
    _problem(128, FP32, "sm_89", allow_tf32=True),
    _problem(64, FP32, "sm_90", is_causal=True),
    _problem(33, BF16, "sm_90"),  # rows of 66 bytes
]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Problem, Future[list[KernelReport]]]]:
    """All of them compiling side by side."""
    with compiler_pool() as pool:
        yield {problem: compile_kernels(pool, "cute", problem) for problem in PROBLEMS}


@pytest.mark.limit(300)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.target}-{p.id}")
def test_kernels_use_what_every_card_has(compiled, problem):
    reports = {report.kernel: report for report in compiled[problem].result()}
    assert sorted(reports) == [
        f"portable{name}" for name in ("dkdv", "dq", "forward", "preprocess")
    ]
    del reports["portablepreprocess"]
    copies = r"cp\.async\.c[ag]"
    for name, report in reports.items():
        expected = [r"mma\.sync", "ldmatrix"]
        if problem.head_dim != 33 or name == "portabledkdv":  # which copies row statistics too
            expected.append(copies)
        for instruction in expected:
            assert re.search(instruction, report.assembly), f"{name} has no {instruction}"
        assert not report.spill_bytes, name
        assert not report.warnings, name
        assert report.shared_bytes <= SHARED_BYTES, name
