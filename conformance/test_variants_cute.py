"""Variants of the CuTe kernels: what their tiles take of a card, and what they refuse."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_rosetta import Backend, Problem, registry
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool
from flash_rosetta.kernels import plan_without_memory
from flash_rosetta.variants import RUNGS, ForwardTileSize

pytest.importorskip("cutlass")

KIB = 1024
MULTIPROCESSOR = 228 * KIB
"""Shared memory that all programs on a multiprocessor of sm_90 have, 1 KiB of each one's unused."""

BELOW_TMA = ("baseline", "tiles", "skip", "mask", "exp2", "cast")


def _problem(**changes: Any) -> Problem:
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 1000, "head_dim": 128, "target": "sm_90"}
    return Problem(**sizes | changes)


@pytest.fixture(scope="module")
def cute() -> Backend:
    return registry.get("cute")


def _module(name: str) -> ModuleType:
    """One of the backend's files."""
    return sys.modules[f"{type(registry.get('cute')).__module__.rpartition('.')[0]}.{name}"]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with compiler_pool() as processes:
        yield processes


@pytest.mark.parametrize(
    ("text", "head_dim"),
    [("64x64w4s3", 64), ("128x96w8s2", 128), ("192x64w12s2", 64), ("128x64w8s2", 256)],
)
def test_tiles_take_the_shared_memory_and_registers_that_are_counted(cute, pool, text, head_dim):
    problem = _problem(head_dim=head_dim)
    (report,) = compile_kernels(pool, f"cute:{text}", problem).result()
    size = ForwardTileSize.parse(text)
    counted = cute.shared_bytes(size, problem)
    assert counted <= report.shared_bytes <= counted + KIB  # barriers, and tiles aligned to 1 KiB
    assert not report.spill_bytes
    assert not report.warnings
    tile = _module("variants")._tile(size, problem)
    assert re.findall(r"setmaxnreg\.inc\S*\s+(\d+)", report.assembly) == [str(tile.registers)]
    threads = 128 * (tile.warpgroups + 1)
    left = threads * report.registers - 128 * _module("tiles").PRODUCER_REGISTERS
    assert 128 * tile.warpgroups * tile.registers <= left, "consumers would wait for ever"


def test_two_halves_of_p_do_not_spill(pool):
    """They would make what the rung cast gains look like more."""
    (report,) = compile_kernels(pool, "cute:exp2", _problem(head_dim=256)).result()
    assert not report.spill_bytes


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_are_not_refused_have_room(cute, head_dim, is_causal):
    """All threads of a program start with as many registers; who asks for more than are left waits
    for ever, and to ask for fewer than one has is undefined."""
    problem = _problem(head_dim=head_dim, is_causal=is_causal)
    taken = [size for size in cute.tile_sizes(problem) if not cute.with_tile(size).why_not(problem)]
    assert taken
    for size in taken:
        tile = _module("variants")._tile(size, problem)
        threads = 128 * (tile.warpgroups + 1)
        at_the_start = min(65536 // (threads * tile.programs), 255) // 8 * 8
        producer = _module("tiles").PRODUCER_REGISTERS
        assert 128 * (producer + tile.warpgroups * tile.registers) <= at_the_start * threads, size
        assert at_the_start <= tile.registers <= 255, size
        assert tile.registers % 8 == 0, size
        barriers = KIB
        bytes_taken = cute.shared_bytes(size, problem) + barriers + KIB
        assert tile.programs * bytes_taken <= MULTIPROCESSOR, size


def test_sizes_that_ship_give_the_tiles_that_ship():
    tiles, variants = _module("tiles"), _module("variants")
    shipped = [(width, each.forward) for width, each in tiles.HOPPER.items()]
    shipped += [(width, long.forward) for (width, _), long in tiles.LONG.items()]
    for width, tile in shipped:
        size = ForwardTileSize(tile.tile_q, tile.tile_k, tile.tile_q // 16, tile.num_stages)
        assert variants._tile(size, _problem(head_dim=width)) == tile


def test_tiles_of_the_ladder_fit_the_smallest_card():
    tiles = _module("tiles")
    for width, tile in [(256, tiles.BASELINE_FORWARD), *tiles.LADDER_FORWARD.items()]:
        assert tile.tile_q % (16 * tile.warps) == 0, tile
        rows = tile.tile_q + 2 * tile.num_stages * tile.tile_k
        assert rows * width * 2 <= 99 * KIB, tile


def test_each_rung_has_what_the_rungs_below_it_have():
    recipes = {rung: _recipe(rung) for rung in BELOW_TMA}
    flags = {}
    for rung, recipe in recipes.items():
        kernel = recipe.kernel(**recipe.options)
        flags[rung] = [kernel.skip, kernel.mask_ends, kernel.exp2, kernel.cast]
    assert [sum(each) for each in flags.values()] == [0, 0, 1, 2, 3, 4]
    assert all(sorted(each, reverse=True) == each for each in flags.values())
    tiles = [recipe.options["tile"] for recipe in recipes.values()]
    assert tiles[0] != tiles[1]
    assert len(set(tiles[1:])) == 1, "only the rung tiles changes them"


@pytest.mark.parametrize(("rung", "sign"), [("mask", -0.3), ("exp2", -1.0), ("cast", -1.0)])
def test_the_scale_is_a_factor_of_its_own_below_exp2(rung, sign):
    factor, _, by_hand, _ = _recipe(rung, scale=-0.3).scalars
    assert by_hand == sign
    assert factor == (1.0 if rung == "mask" else pytest.approx(0.3 * 1.4426950408889634))


def test_no_two_variants_share_a_file_on_disk():
    recipes = {rung.name: _recipe(rung.name) for rung in RUNGS if rung.direction == "forward"}
    recipes |= {text: _recipe(text) for text in ("64x64w4s2", "64x64w4s3", "128x64w8s2")}
    recipes["short"] = _recipe("overlap", seqlen_q=64)
    names = {
        name: _module("disk_cache").name_of(recipe.kernel, "sm_90a", recipe.options)
        for name, recipe in recipes.items()
    }
    assert names.pop("short") == names["overlap"], "sizes are no part of a kernel at head_dim 128"
    assert len(set(names.values())) == len(names)


def _recipe(variant: str, **changes: Any) -> Any:
    """Of the launch of a variant's forward."""
    backend = registry.get(f"cute:{variant}")
    (launch,) = plan_without_memory(_problem(**changes), backend.plan, None)
    return launch.recipe


@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("tma", {"target": "sm_89"}, "target sm_89 is not sm_90"),
        ("specialize", {"dtype": torch.float32}, "float32.*operands of 16 bits"),
        ("overlap", {"head_dim": 33}, "rows of head_dim 33 take 66 bytes"),
        ("64x64w4s2", {"target": "sm_100"}, "target sm_100 is not sm_90"),
        ("64x64w4s2", {"head_dim": 33}, "rows of head_dim 33 take 66 bytes"),
        ("128x192w8s3", {}, "128x192w8s3 at head_dim 128 is 327680 bytes, and sm_90 has 232448"),
        ("64x128w4s3", {}, "is 229376 bytes, and sm_90 has .* holds two such programs"),
        ("192x192w12s2", {"head_dim": 64}, "needs about 208 registers .* warpgroups have 160"),
        (
            "atomics",
            {"deterministic": True, "needs_backward": True},
            "atomics add to dq in any order",
        ),
        ("atomics", {"head_dim": 256, "needs_backward": True}, "head_dim 256 is above 128"),
        ("second-pass", {"target": "sm_80", "needs_backward": True}, "target sm_80 is not sm_90"),
        ("cast", {"head_dim": 300}, "head_dim 300 is above 256"),
    ],
)
def test_what_a_variant_cannot_run_it_refuses_with_the_reason(variant, changes, reason):
    (found,) = registry.get(f"cute:{variant}").why_not(_problem(**changes))
    assert re.search(reason, found)


@pytest.mark.parametrize("rung", BELOW_TMA)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_rungs_below_tma_run_on_every_card(rung, target):
    for changes in ({"head_dim": 33}, {"dtype": torch.float32}, {"is_causal": True, "scale": 0.0}):
        assert registry.get(f"cute:{rung}").why_not(_problem(target=target, **changes)) == []


def test_the_backward_rungs_are_two_kernels(cute):
    problem = _problem(seqlen_q=2000, needs_backward=True)
    kernels = {}
    for rung in ("second-pass", "atomics"):
        launches = plan_without_memory(
            problem, cute.plan_forward, registry.get(f"cute:{rung}").plan
        )
        kernels[rung] = [launch.recipe.kernel.__name__ for launch in launches[1:]]
    assert not set(kernels["second-pass"]) & set(kernels["atomics"])
    plan = partial(plan_without_memory, plan_forward=cute.plan_forward)
    shipped = plan(problem, plan_backward=cute.plan_backward)
    assert [launch.recipe.kernel.__name__ for launch in shipped[1:]] == kernels["atomics"]
    problem = replace(problem, deterministic=True)
    shipped = plan(problem, plan_backward=cute.plan_backward)
    assert [launch.recipe.kernel.__name__ for launch in shipped[1:]] == kernels["second-pass"]


@pytest.mark.parametrize(
    ("head_dim", "short", "long"),
    [
        (32, {"seqlen_q": 700, "seqlen_k": 5000}, {"seqlen_q": 800, "seqlen_k": 100}),
        (64, {"seqlen_q": 1000, "is_causal": True}, {"seqlen_q": 1100, "is_causal": True}),
        (128, {"seqlen_q": 5000, "seqlen_k": 200}, {"seqlen_q": 100, "seqlen_k": 300}),
        (128, {"seqlen_q": 700, "is_causal": True}, {"seqlen_q": 800, "is_causal": True}),
    ],
)
def test_short_problems_take_two_passes(cute, head_dim, short, long):
    for changes, passes in ((short, "Dq"), (long, "OnePass")):
        problem = _problem(head_dim=head_dim, needs_backward=True, **changes)
        launches = plan_without_memory(problem, cute.plan_forward, cute.plan_backward)
        assert passes in [launch.recipe.kernel.__name__ for launch in launches], changes
