"""`flash-rosetta measure`: the whole report of this machine, the race and every part beside it."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flash_rosetta import machine
from flash_rosetta.bench import card as cards
from flash_rosetta.bench.card import Card
from flash_rosetta.bench.parts import PARTS
from flash_rosetta.bench.race import RESULTS
from flash_rosetta.bench.report import is_yardstick

RACE = "race"
STEPS = {RACE: "every contender against every other, correct before fast"} | PARTS
ROUNDS = 20
LIMIT = 900.0
"""Seconds after which a step that hangs is given up."""

DESCRIPTION = """\
Measure everything that the report shows, in this order, each in a process of its own:
{steps}
Results go into one file, after each step, so that an interrupted run keeps what it has. Then the
page with tables and plots is made from that file. A step that fails is noted there, the others go
on, and the exit status is 1."""

Take = Callable[[str], dict[str, Any]]
"""Measures a step: the race's JSON, or a part. `error` is one line, where it failed."""


def main(argv: list[str] | None = None) -> int:
    """Measure, write, show.

    0: all is well; 1: a step failed or a backend was wrong; 2: bad usage; 130: interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    info = machine.describe()
    if arguments.save:
        _check_save(parser, arguments, info)
        path = RESULTS / f"{cards.slug(info['card'])}.json"
    else:
        path = arguments.out or Path(f"{cards.slug(info['card'])}.json")
    card = cards.empty(info, _now())
    if path.exists():
        try:
            card = {"parts": {}} | cards.read(path)
        except ValueError as error:
            parser.error(str(error))
        if card["machine_info"].get("card") != info["card"]:
            parser.error(
                f"{path} holds results of {cards.name(card)}, this is "
                f"{info['card'] or 'a machine without a GPU'}; give another --out"
            )
    steps = [step for step in STEPS if not arguments.only or step in arguments.only]
    if arguments.resume:
        steps = missing(card, steps, info["commit"])

    def take(step: str) -> dict[str, Any]:
        return _in_a_process(step, has_gpu=info["card"] is not None, arguments=arguments)

    try:
        failed = measure(card, steps, take, path)
    except KeyboardInterrupt:
        print(f"\nstopped; {path} has what was measured, --resume measures the rest")
        return 130
    for step, error in failed.items():
        print(f"{step} failed: {error}", file=sys.stderr)
    wrong = [
        record
        for record in card.get("no_number", ())
        if record["verdict"] in ("wrong", "failed") and not is_yardstick(record["backend"])
    ]
    if wrong:
        print(f"the race has {len(wrong)} backends that were wrong or failed", file=sys.stderr)
    print(f"wrote {path}")
    _show(path, arguments.save)
    return int(bool(failed or wrong))


def measure(card: Card, steps: Sequence[str], take: Take, path: Path) -> dict[str, str]:
    """Take the steps, and write the card after each; the errors of those that failed, by step."""
    failed = {}
    for i, step in enumerate(steps, 1):
        print(f"[{i}/{len(steps)}] {step}: {STEPS[step]}", flush=True)
        taken = take(step)
        if step == RACE:
            parts = card["parts"]
            card.clear()
            card |= taken | {"parts": parts}
        else:
            card["parts"][step] = taken
        cards.write(card, path)
        if "error" in taken:
            failed[step] = taken["error"]
    return failed


def missing(card: Card, steps: Sequence[str], commit: str | None) -> list[str]:
    """Those of the steps that the card lacks, has an error of, or has of another commit.

    A commit that is unknown, or that files were modified after, says nothing about the code.
    """
    if commit is None or commit.endswith("-dirty"):
        return list(steps)

    def is_there(step: str) -> bool:
        held = card if step == RACE and card["benchmarks"] else card["parts"].get(step)
        return bool(held) and "error" not in held and held["machine_info"].get("commit") == commit

    return [step for step in steps if not is_there(step)]


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, STEPS))
    parser = argparse.ArgumentParser(
        prog="flash-rosetta measure",
        description=DESCRIPTION.format(
            steps="\n".join(f"  {step:<{width}}  {what}" for step, what in STEPS.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--save",
        action="store_true",
        help="write bench/results/CARD.json in this checkout, its page and plot, and the README",
    )
    where.add_argument(
        "--out", type=Path, metavar="FILE", help="write there (default: CARD.json in this folder)"
    )
    add = parser.add_argument
    add(
        "--only",
        action="append",
        default=[],
        choices=tuple(STEPS),
        metavar="STEP",
        help="measure this step alone, and keep what the file has of the others; may be repeated",
    )
    add(
        "--resume",
        action="store_true",
        help="measure only what the file lacks for this commit, or has an error of",
    )
    add(
        "--rounds",
        type=int,
        default=ROUNDS,
        metavar="R",
        help=f"of each contender in the race (default: {ROUNDS})",
    )
    add(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="in all steps but the race: this backend alone; may be repeated",
    )
    add("--quick", action="store_true", help="a few small points, to see that it works")
    return parser


def _check_save(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, info: dict[str, Any]
) -> None:
    if info["card"] is None:
        parser.error("--save needs a GPU: a CPU has no times worth keeping; use --out")
    if arguments.quick or arguments.backend:
        parser.error("--save keeps whole reports: leave out --quick and --backend, or use --out")
    if not RESULTS.is_dir():
        parser.error(f"--save needs a checkout, and {RESULTS} does not exist; use --out")


def _in_a_process(step: str, has_gpu: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """The step, measured by a Python of its own, which says what it does as it goes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "taken.json"
        command = [sys.executable, "-m"]
        if step == RACE:
            command += ["flash_rosetta", "race", "--out", str(file)]
            command += ["--rounds", str(arguments.rounds)]
            command += _selection(has_gpu, arguments.quick)
        else:
            command += ["flash_rosetta.bench.part", step, str(file)]
            command += ["--quick"] * arguments.quick
            command += [f"--backend={name}" for name in arguments.backend]
        try:
            status = subprocess.run(command, timeout=LIMIT, check=False).returncode
            ended = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {LIMIT:.0f} s"
        if file.exists():
            taken: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return taken
    failed = cards.empty(machine.describe(), _now()) | {"error": ended}
    return failed if step == RACE else failed | {"records": []}


def _selection(has_gpu: bool, is_quick: bool) -> list[str]:
    """The race's options for what to race: a CPU has the captured inputs alone."""
    if not has_gpu:
        return ["--workload", "captured"] + ["--seqlen", "36"] * is_quick
    if is_quick:
        return ["--workload", "grid", "--head-dim", "64", "--seqlen", "512", "--warm"]
    return ["--workload", "all", "--warm"]


def _show(path: Path, is_saved: bool) -> None:
    """Make the page, and the README where the results are committed ones."""
    needs = [package for package in ("matplotlib", "jinja2") if find_spec(package) is None]
    if needs:
        command = "make readme" if is_saved else f"flash-rosetta report {path}"
        print(f"for the page: pip install {' '.join(needs)}, then {command}")
        return
    if is_saved:
        from flash_rosetta.bench import readme

        readme.main([])
    else:
        from flash_rosetta.bench import report_command

        report_command.main([str(path), "--html", str(path.with_suffix(".html"))])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
