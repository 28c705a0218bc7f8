"""`flash-rosetta info`: the machine, what each backend can run on it, and every reason why not."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flash_rosetta import machine, registry
from flash_rosetta.attention import BACKEND_VARIABLE
from flash_rosetta.problem import DTYPE_NAMES, Problem, target_of

REPRESENTATIVE = Problem(
    batch=2, num_heads=8, num_kv_heads=2, seqlen_q=1000, head_dim=128, is_causal=True
)
"""A problem that asks for what most uses need: grouped heads, a ragged length, a causal mask."""

_REPRESENTATIVE_TEXT = "for 2 x 8 query and 2 x 2 key heads, 1000 tokens, head_dim 128, causal"

INTERPRETER_VARIABLE = "TRITON_INTERPRET"

Reasons = dict[str, dict[str, dict[str, list[str]]]]
"""backend -> dtype -> direction -> every reason why not, empty when it can."""


def why_not_each(problem: Problem = REPRESENTATIVE) -> Reasons:
    """Why each backend cannot run `problem` in each dtype, forward alone and with its backward."""
    return {
        name: {
            dtype_name: {
                direction: _why_not(
                    name, replace(problem, dtype=dtype, needs_backward=direction == "backward")
                )
                for direction in ("forward", "backward")
            }
            for dtype, dtype_name in DTYPE_NAMES.items()
        }
        for name in registry.names()
    }


def report() -> dict[str, Any]:
    """What `info` prints, as plain JSON values."""
    target = target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    problem = replace(REPRESENTATIVE, target=target)
    reasons = why_not_each(problem)
    return {
        "machine": machine.describe(),
        "settings": {
            "target": target,
            BACKEND_VARIABLE: os.environ.get(BACKEND_VARIABLE),
            INTERPRETER_VARIABLE: os.environ.get(INTERPRETER_VARIABLE),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "problem": problem.id,
        "auto": {dtype: _auto(reasons, dtype, target) for dtype in DTYPE_NAMES.values()},
        "why_not": reasons,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the report, for a person or with --json for a program."""
    parser = argparse.ArgumentParser(
        prog="flash-rosetta info",
        description="This machine, what each backend can run on it, and every reason why not. "
        "Changes nothing; paste it into a bug report.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    facts = report()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, Console(highlight=False))
    return 0


def _why_not(name: str, problem: Problem) -> list[str]:
    try:
        return registry.why_not(name, problem)
    except Exception as error:  # info is where a broken third-party backend gets found
        return [f"is broken: {type(error).__name__}: {error}"]


def _auto(reasons: Reasons, dtype: str, target: str) -> str | None:
    candidates = registry.auto_candidates(target)
    return next((name for name in candidates if not reasons[name][dtype]["backward"]), None)


def _print(facts: dict[str, Any], console: Console) -> None:
    _section(console, "Machine", _pairs(_machine_lines(facts["machine"])))
    _section(console, "Settings", _pairs(_setting_lines(facts["settings"])))
    _section(console, f"Backends, {_REPRESENTATIVE_TEXT}", _support_table(facts))
    refusals = [
        (name, f"{_case_names(cases)}: {reason}")
        for name, by_dtype in facts["why_not"].items()
        for reason, cases in _group(by_dtype).items()
    ]
    if refusals:
        _section(console, "Why not", _pairs(refusals))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print(title, style="bold", markup=False)
    console.print(Padding(body, (0, 0, 1, 2)))


def _machine_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    def known(template: str, *keys: str) -> str:
        values = [facts[key] for key in keys]
        return "" if None in values else template.format(*values)

    def joined(*parts: str) -> str:
        return ", ".join(filter(None, parts))

    shared = facts["shared_bytes_per_block"]
    lines = [
        ("card", facts["card"] or "none: kernels can be interpreted or compiled here, not timed"),
        (
            "",
            joined(
                known("compute capability {}", "compute_capability"),
                known("{} multiprocessors", "multiprocessors"),
                f"{shared // 1024} KB shared memory per block" if shared else "",
            ),
        ),
        (
            "now",
            joined(
                known("{:.0f} of {:.0f} MHz", "sm_clock_mhz", "max_sm_clock_mhz"),
                known("memory {:.0f} MHz", "memory_clock_mhz"),
                known("{:.0f} C", "temperature_c"),
                known("{:.0f} of {:.0f} W", "power_w", "power_limit_w"),
            ),
        ),
        (
            "CUDA",
            joined(known("{}", "cuda"), known("cuDNN {}", "cudnn"), known("driver {}", "driver")),
        ),
        ("cpu", f"{facts['cpu']}, {facts['cpu_cores']} cores"),
        ("system", f"Python {facts['python']}, {facts['platform']}"),
        ("code", joined(known("flash-rosetta {}", "flash-rosetta"), known("commit {}", "commit"))),
        (
            "packages",
            ", ".join(f"{p} {facts[p] or '-'}" for p in ("torch", *machine.PACKAGES)),
        ),
    ]
    return [(label, text) for label, text in lines if text]


def _setting_lines(settings: dict[str, Any]) -> list[tuple[str, str]]:
    interpreted = (settings[INTERPRETER_VARIABLE] or "").lower() in ("1", "true", "on", "yes", "y")
    precision = settings["float32_matmul_precision"]
    return [
        ("backend", settings[BACKEND_VARIABLE] or f"auto ({BACKEND_VARIABLE} is not set)"),
        (
            "Triton",
            f"interpreted on the CPU ({INTERPRETER_VARIABLE}=1)"
            if interpreted
            else f"compiled ({INTERPRETER_VARIABLE}=1 would interpret it on the CPU)",
        ),
        (
            "fp32",
            f"matmul precision {precision!r}: "
            + ("TF32 is off" if precision == "highest" else "TF32 is allowed"),
        ),
    ]


def _support_table(facts: dict[str, Any]) -> Group:
    table = Table("backend", *DTYPE_NAMES.values())
    for name, by_dtype in facts["why_not"].items():
        cells = []
        for dtype, by_direction in by_dtype.items():
            runs = [direction for direction, reasons in by_direction.items() if not reasons]
            color = "green" if "backward" in runs else "yellow" if runs else "red"
            star = " *" if facts["auto"][dtype] == name else ""
            text = {0: "no", 1: f"{'/'.join(runs)} only", 2: "yes"}[len(runs)]
            cells.append(f"[{color}]{text}{star}[/{color}]")
        table.add_row(name, *cells)
    return Group(table, '* what backend="auto" takes, forward and backward')


def _group(by_dtype: dict[str, dict[str, list[str]]]) -> dict[str, list[tuple[str, str]]]:
    """reason -> the (dtype, direction) pairs that it holds for."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for dtype, by_direction in by_dtype.items():
        for direction, reasons in by_direction.items():
            for reason in reasons:
                groups.setdefault(reason, []).append((dtype, direction))
    return groups


def _case_names(cases: list[tuple[str, str]]) -> str:
    if len(cases) == 2 * len(DTYPE_NAMES):
        return "any dtype"
    dtypes = dict.fromkeys(dtype for dtype, _ in cases)
    both = [
        dtype for dtype in dtypes if (dtype, "forward") in cases and (dtype, "backward") in cases
    ]
    parts = [", ".join(both)] if both else []
    parts += [f"{dtype} {direction}" for dtype, direction in cases if dtype not in both]
    return ", ".join(parts)


def _pairs(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True, min_width=9)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(text))  # plain: a reason may hold [brackets]
    return grid
