"""Counts what became of each backend's tests, and why the skipped ones were skipped."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flash_rosetta.machine import describe

NO_BACKEND = "(none)"
"""Stands for the backend of tests that are about none."""

REASONS_SHOWN = 12
"""Reasons for skips printed for one backend; the rest is counted."""

OUTCOMES = ("passed", "failed", "xfailed", "skipped")


@dataclass
class Tally:
    """What became of one backend's tests; `reasons` are those given for skips."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    by_capability: defaultdict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    failures: list[dict[str, str]] = field(default_factory=list)
    expected_failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def executed(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["skipped"]


class Tallies:
    """A pytest plugin: fills a tally for each backend, prints them, and fails an idle run."""

    def __init__(self, must_run: Collection[str]):
        self.must_run = must_run
        self.of: defaultdict[str, Tally] = defaultdict(Tally)

    def idle(self) -> list[str]:
        """Backends that were to be tested and of which no test was executed."""
        skipped_only = {name for name, tally in self.of.items() if not tally.executed}
        never_seen = set(self.must_run) - self.of.keys()
        return sorted((skipped_only | never_seen) - {NO_BACKEND})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        tally = self.of[str(properties.get("backend", NO_BACKEND))]
        if (outcome := _outcome(report)) is None:
            return
        tally.outcomes[outcome] += 1
        for capability in str(properties.get("capabilities", "")).split():
            tally.by_capability[capability][outcome] += 1
        if outcome == "skipped":
            tally.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1  # type: ignore[index]
        elif outcome == "xfailed":
            tally.expected_failures.append({"test": report.nodeid, "reason": report.wasxfail})
        elif outcome == "failed":
            message = str(report.longrepr) or "passes, though it is expected to fail"
            tally.failures.append({"test": report.nodeid, "message": message})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        collect_only = session.config.getoption("collectonly")
        if self.idle() and not collect_only and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (path := session.config.getoption("--json")) and not collect_only:
            text = json.dumps(self.as_json(int(session.exitstatus)), indent=1)
            Path(path).write_text(text + "\n", encoding="utf-8")

    def as_json(self, exit_status: int) -> dict[str, Any]:
        """The whole run as plain JSON values."""
        backends = {name: vars(tally) for name, tally in self.of.items() if name != NO_BACKEND}
        return {
            "exit_status": exit_status,
            "not_executed": self.idle(),
            "machine": describe(),
            "backends": backends,
        }

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        usage_error = exitstatus == pytest.ExitCode.USAGE_ERROR
        if usage_error or config.getoption("collectonly") or not (self.of or self.idle()):
            return
        terminalreporter.section("flash-rosetta conformance")
        width = max(map(len, ["backend", *self.of]))
        terminalreporter.line(
            f"{'backend':<{width}}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)
        )
        for name, tally in self.of.items():
            counts = "".join(f"{tally.outcomes[outcome]:>9}" for outcome in OUTCOMES)
            terminalreporter.line(f"{name:<{width}}{counts}")
        for line in self._by_capability():
            terminalreporter.line(line)
        for name, tally in self.of.items():
            for reason, count in tally.reasons.most_common(REASONS_SHOWN):
                terminalreporter.line(f"{name} skipped {count}: {reason}")
            if (rest := len(tally.reasons) - REASONS_SHOWN) > 0:
                terminalreporter.line(f"{name}: {rest} more reasons; -rs prints all")
        for name in self.idle():
            terminalreporter.line(
                f"ERROR: backend {name!r} was to be tested, but no test of it was executed",
                red=True,
            )

    def _by_capability(self) -> list[str]:
        """A table of what passed of what was executed, and how much was skipped."""
        tested = {name: tally for name, tally in self.of.items() if tally.by_capability}
        capabilities = sorted({c for tally in tested.values() for c in tally.by_capability})
        rows = [["capability: passed of executed, skipped", *tested]]
        for capability in capabilities:
            cells = [_cell(tally.by_capability.get(capability)) for tally in tested.values()]
            rows.append([f"  {capability}", *cells])
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        lines = [
            "".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return lines if capabilities else []


def _outcome(report: pytest.TestReport) -> str | None:
    """One of OUTCOMES, None for a report that decides nothing."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "failed"
    if report.skipped or report.failed or report.when == "call":
        return str(report.outcome)
    return None


def _cell(outcomes: Counter[str] | None) -> str:
    if outcomes is None:
        return "-"
    skipped = f", {outcomes['skipped']} skipped" if outcomes["skipped"] else ""
    executed = sum(outcomes.values()) - outcomes["skipped"]
    return f"{outcomes['passed']} of {executed}{skipped}"
