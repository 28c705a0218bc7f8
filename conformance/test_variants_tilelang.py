"""TileLang's variants: rungs made of what they are about, tiles that a card has room for.

Nothing here runs a kernel. Where there is no assembler, CUDA C++ is looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_rosetta import Backend, Problem, registry
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool
from flash_rosetta.variants import RUNGS, ForwardTileSize

pytest.importorskip("tilelang", exc_type=ImportError)

MMA = r"mma\.sync|mma_sync"
WGMMA = r"wgmma\.mma_async|wgmma_[sr]s"
ASYNC_COPIES = r"cp\.async\.c[ag]|cp_async_gs"
COPY_ENGINE = r"cp\.async\.bulk\.tensor|tma_load"
MOVES_REGISTERS = r"setmaxnreg|warpgroup_reg_alloc"
ADDS_TO_MEMORY = r"(?:red|atom)\.global[.\w]*\.add|AtomicAdd"
INSTRUCTIONS = MMA, WGMMA, ASYNC_COPIES, COPY_ENGINE, MOVES_REGISTERS, ADDS_TO_MEMORY

MADE_OF = {
    "tma": {WGMMA, COPY_ENGINE},
    "specialize": {WGMMA, COPY_ENGINE, MOVES_REGISTERS},
    "atomics": {WGMMA, COPY_ENGINE, ADDS_TO_MEMORY},
}
"""Of INSTRUCTIONS, those in a rung's kernel; the other rungs that do not ship have BELOW."""

BELOW = {MMA, ASYNC_COPIES}

SHIPPED = ("overlap", "second-pass")


def _problem(**changes: Any) -> Problem:
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 1000, "head_dim": 128, "target": "sm_90"}
    return Problem(**sizes | changes)


@pytest.fixture(scope="module")
def tilelang() -> Backend:
    return registry.get("tilelang")


@pytest.fixture(scope="module")
def tiles(tilelang: Backend) -> ModuleType:
    """The backend's file of tiles."""
    return sys.modules[f"{type(tilelang).__module__.rpartition('.')[0]}.tiles"]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with compiler_pool() as processes:
        yield processes


@pytest.mark.limit(300)
def test_rungs_are_made_of_what_they_are_about(pool):
    compiled = {
        rung: compile_kernels(
            pool,
            f"tilelang:{rung.name}",
            _problem(is_causal=True, needs_backward=rung.direction == "backward"),
        )
        for rung in RUNGS
        if rung.name not in SHIPPED
    }
    for rung, future in compiled.items():
        *_, report = future.result()
        found = {each for each in INSTRUCTIONS if re.search(each, report.assembly)}
        assert found == MADE_OF.get(rung.name, BELOW), rung.name
        assert not report.spill_bytes, rung.name
        assert not report.warnings, rung.name
        assert report.shared_bytes <= 227 * 1024, rung.name


@pytest.mark.parametrize("text", ["64x64w4s3", "128x96w8s2"])
def test_shared_memory_of_tiles_is_what_the_compiler_takes(tilelang, pool, text):
    problem = _problem()
    (report,) = compile_kernels(pool, f"tilelang:{text}", problem).result()
    counted = tilelang.shared_bytes(ForwardTileSize.parse(text), problem)
    barriers = 0 if report.registers else 1024  # which only the assembler counts
    assert counted == report.shared_bytes + barriers
    assert not report.spill_bytes


def test_sizes_that_ship_give_the_tiles_that_ship(tiles):
    shipped = [(width, False, each.forward) for width, each in tiles.HOPPER.items()]
    shipped += [(*kind, long.forward) for kind, long in tiles.LONG.items()]
    for width, is_causal, tile in shipped:
        size = ForwardTileSize(tile.tile_q, tile.tile_k, tile.tile_q // 16, tile.num_stages)
        assert tiles.hopper_tile(size, width, is_causal) == tile


def test_threads_of_a_rung_copy_whole_tiles(tiles):
    """Eight elements each at a time: a loop over a tile's rows would leave some out in silence."""
    for width, tile in [(64, tiles.BASELINE_FORWARD), *tiles.LADDER_FORWARD.items()]:
        threads = 32 * tile.tile_q // tile.warp_rows
        for rows in (tile.tile_q, tile.tile_k):
            assert rows * width % (8 * threads) == 0, tile
        bytes_taken = (tile.tile_q + 2 * tile.num_stages * tile.tile_k) * width * 2
        assert bytes_taken <= 99 * 1024, tile
    for width, tile in tiles.PORTABLE_ATOMIC.items():
        for rows in (tile.tile_q, tile.tile_k):
            assert rows * width % (8 * tile.threads) == 0, tile
        assert 128 % tile.tile_q == 0, tile  # the padding of the row statistics


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_warpgroup_waits_for_registers_that_are_not_there(tilelang, tiles, head_dim, is_causal):
    """All threads of a program start with as many; who asks for more than are left waits for ever,
    and to ask for fewer than one has is undefined."""
    problem = _problem(head_dim=head_dim, is_causal=is_causal)
    runs = 0
    for size in tilelang.tile_sizes(problem):
        if registry.get(f"tilelang:{size}").why_not(problem):
            continue
        runs += 1
        tile = tiles.hopper_tile(size, head_dim, is_causal)
        threads = 128 * (tile.warpgroups + 1)
        at_the_start = min(65536 // (threads * tile.shares), 255) // 8 * 8
        asked = 128 * (tiles.PRODUCER_REGISTERS + tile.warpgroups * tile.registers)
        assert asked <= at_the_start * threads, size
        assert at_the_start <= tile.registers <= 255, size
        assert tile.registers % 8 == 0, size
        assert tile.programs * (tilelang.shared_bytes(size, problem) + 1024) <= 228 * 1024, size
    assert runs


@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("tma", {"target": "sm_89"}, "target sm_89 is not sm_90"),
        ("specialize", {"dtype": torch.float32}, "float32.*operands of 16 bits"),
        ("overlap", {"head_dim": 33}, "head_dim 33 take 66 bytes"),
        ("64x64w4s2", {"target": "sm_100"}, "target sm_100 is not sm_90"),
        ("128x192w8s3", {}, "128x192w8s3 at head_dim 128 is 328704 bytes, and sm_90 has 232448"),
        ("192x192w12s2", {"head_dim": 64}, "S, P and O take about 208 of a thread's 160"),
        ("64x32w4s2", {"head_dim": 256}, "operands of a product take about 158 of a thread's 128"),
        ("atomics", {"deterministic": True, "needs_backward": True}, "add to dq in any order"),
        ("atomics", {"dtype": torch.float32, "needs_backward": True}, "for fp16 and bf16"),
        ("cast", {"head_dim": 300}, "head_dim 300 is above 256"),
        ("atomics", {"head_dim": 300, "needs_backward": True}, "head_dim 300 is above 256"),
    ],
)
def test_what_a_variant_cannot_run_it_refuses_with_the_reason(variant, changes, reason):
    (found,) = registry.get(f"tilelang:{variant}").why_not(_problem(**changes))
    assert re.search(reason, found)
