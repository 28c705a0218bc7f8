"""Hunts the planted faults: runs, on each, the test that must catch it, and prints the kill table.

`flash-rosetta conformance --kill-table`; with `--device cuda`, those that show on a GPU alone.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flash_rosetta import registry
from flash_rosetta.conformance.mutants import MUTANTS
from flash_rosetta.conformance.nested import run_suite
from flash_rosetta.conformance.planting import UNBROKEN, Mutant, Test


@dataclass(frozen=True)
class Kill:
    """What the test that must catch a mutant did to it, and to the backend without the fault.

    `runs`, `kills` (a check judged) and `crashes` count cases on the mutant, the other two on the
    unbroken backend, of which all must pass and some must run.
    """

    mutant: Mutant
    runs: int
    kills: int
    crashes: int
    passes_unbroken: int
    failures_unbroken: int

    @property
    def is_clean(self) -> bool:
        return self.kills > 0 and self.failures_unbroken == 0 and self.passes_unbroken > 0

    @property
    def verdict(self) -> str:
        if self.failures_unbroken:
            return f"NO PROOF: without the fault, {self.failures_unbroken} fail as well"
        if not self.passes_unbroken:
            return "NO PROOF: the test does not run without the fault"
        if self.is_clean:
            return f"killed, {self.kills} of {self.runs}"
        return f"CRASHES, {self.crashes} of {self.runs}" if self.crashes else "SURVIVES"


def hunt(mutants: Collection[Mutant] = MUTANTS, device: str = "cpu") -> list[Kill]:
    """Run the collected tests of the suite that must catch `mutants`, in this process.

    Mutants that cannot be hunted on `device` are left out.
    """
    mutants = [m for m in mutants if m.caught_by and not m.why_not_hunted(device)]
    chosen: defaultdict[str, set[Test]] = defaultdict(set)
    for mutant in mutants:
        for name in (mutant.name, mutant.unbroken):
            chosen[name] |= {mutant.caught_by} if mutant.caught_by else set()
    outcomes = _Outcomes({mutant.name: mutant for mutant in mutants}, chosen)
    files = sorted({test.file for tests in chosen.values() for test in tests})
    registered = [name for name in chosen if name in registry.names()]
    status, printed = run_suite(
        [*mutants, UNBROKEN], files, "-q", "--tb=no", device=device, named=registered,
        plugins=[outcomes],
    )  # fmt: skip
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the suite did not run on its mutants:\n{printed}")
    return [
        Kill(
            mutant,
            outcomes.runs[mutant.name, mutant.caught_by],
            (kills := outcomes.kills[mutant.name, mutant.caught_by]),
            outcomes.failures[mutant.name, mutant.caught_by] - kills,
            outcomes.passes[mutant.unbroken, mutant.caught_by],
            outcomes.failures[mutant.unbroken, mutant.caught_by],
        )
        for mutant in mutants
    ]


class _Outcomes:
    """A pytest plugin: keeps the chosen tests of each backend and counts how they end."""

    def __init__(self, mutants: Mapping[str, Mutant], chosen: Mapping[str, set[Test]]):
        self.mutants = mutants
        self.chosen = chosen
        self.keys: dict[str, list[tuple[str, Test]]] = {}
        self.runs: Counter[tuple[str, Test | None]] = Counter()
        self.passes: Counter[tuple[str, Test | None]] = Counter()
        self.failures: Counter[tuple[str, Test | None]] = Counter()
        self.kills: Counter[tuple[str, Test | None]] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            name = params.get("backend", "")
            purposes = {None, params["case"].purpose} if "case" in params else {None}
            keys = [
                (name, test)
                for test in self.chosen.get(name, ())
                if test.function == item.originalname
                and test.purpose in purposes
                and test.only in item.name.replace(name, "", 1)  # less the backend
            ]
            if keys:
                self.keys[item.nodeid] = keys
        items[:] = [item for item in items if item.nodeid in self.keys]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Iterator[None]:
        mutant = self.mutants.get(item.callspec.params["backend"])
        with mutant.planted() if mutant else nullcontext():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key in self.keys[report.nodeid]:
            self.runs[key] += report.when == "call"
            self.passes[key] += report.when == "call" and report.passed
            self.failures[key] += report.failed

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[None]) -> None:
        for key in self.keys[node.nodeid]:
            mutant = self.mutants.get(key[0])
            if mutant and call.excinfo is not None:
                self.kills[key] += mutant.is_caught_by(call.excinfo.value)


def kill_table(kills: Collection[Kill]) -> str:
    """The kills as text: the fault and the defect it stands for, then the test that catches it."""
    lines = ["planted fault: the published defect that it stands for"]
    lines += ["    verdict, cases that fail of cases that run: the test that must catch it"]
    for kill in kills:
        lines += [f"{kill.mutant.name}: {kill.mutant.stands_for}"]
        lines += [f"    {kill.verdict}: {kill.mutant.caught_by}"]
    return "\n".join(lines)


def main(argv: Sequence[str] = ()) -> int:
    """Print the kill table; the status is 1 when a mutant survives."""
    if list(argv) not in ([], ["--device", "cpu"], ["--device", "cuda"]):
        print(f"--kill-table takes --device cpu or cuda; got {' '.join(argv)}", file=sys.stderr)
        return 2
    device = argv[1] if argv else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "--device cuda needs a GPU, and PyTorch sees none: leave it out, or say cpu",
            file=sys.stderr,
        )
        return 2
    if device == "cpu" and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads the kernels
    kills = hunt(device=device)
    print(kill_table(kills))
    hunted = {kill.mutant.name for kill in kills}
    for mutant in MUTANTS:
        if mutant.name not in hunted:
            print(f"not hunted on {device}: {mutant.name}: {mutant.why_not_hunted(device)}")
    killed = sum(kill.is_clean for kill in kills)
    print(f"{killed} of {len(kills)} planted faults are caught by the test that must catch them")
    return 0 if killed == len(kills) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
