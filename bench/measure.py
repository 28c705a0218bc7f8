"""`flash-rosetta measure`: the whole report of a card, by one command.

The race, then every part of `parts.PARTS`, into one file of results: the race's own JSON, with a
part's records under "parts". The file is written after each step, so that an interrupted run keeps
what it has, and `--resume` takes up what is missing. Then the page, the plots and the README are
made from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from traceback import format_exc
from typing import Any

import torch
from rich.console import Console

from flash_rosetta import machine
from flash_rosetta.bench import race
from flash_rosetta.bench.parts import PARTS, Lab, as_part

RACE = "race"
Card = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure and report. 0: all of it; 1: a part failed, or a backend was wrong; 2: bad usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() and not arguments.cpu:
        parser.error("measuring needs a GPU, and PyTorch sees none; --cpu tries the machinery out")
    if arguments.save == (arguments.out is not None):
        parser.error("say where to: --save for bench/results in this checkout, or --out FILE")
    device = torch.device("cpu")
    if not arguments.cpu:
        device = torch.device("cuda", torch.cuda.current_device())
    out = arguments.out or race.RESULTS / f"{race.slug(machine.describe().get('card'))}.json"
    if arguments.save and not race.RESULTS.is_dir():
        parser.error(f"--save needs a checkout, and {race.RESULTS} does not exist; use --out")
    console = Console()
    lab = Lab(device, console, tuple(arguments.backend), arguments.quick)
    card: Card = json.loads(out.read_text()) if out.exists() else {}
    failed = False
    for name in arguments.only or (RACE, *PARTS):
        if arguments.resume and _is_there(card, name):
            console.print(f"{name}: already there", highlight=False)
            continue
        console.rule(f"{name}: {PARTS.get(name, 'the backends against PyTorch and others')}")
        try:
            if name == RACE:
                card, right = _race(card, arguments.rounds, arguments.quick)
                failed |= not right
            else:
                card.setdefault("parts", {})[name] = as_part(name, lab)
        except Exception:  # a part that fails costs itself alone
            failed = True
            console.print(format_exc(), markup=False, highlight=False, soft_wrap=True)
            continue
        race.write_results(card, out)
    console.print(f"wrote {out}", highlight=False)
    if arguments.save:
        from flash_rosetta.bench import readme

        failed |= bool(readme.main([]))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-rosetta measure",
        description="Measure everything that the report of a card has: the race, "
        + ", ".join(PARTS)
        + ". Some ten minutes on an H200, compiling included.",
    )
    add = parser.add_argument
    add("--save", action="store_true", help="into bench/results, and rewrite page and README")
    add("--out", type=Path, metavar="FILE", help="into this file alone")
    add(
        "--only",
        action="append",
        choices=(RACE, *PARTS),
        help="measure this part alone, anew; may be repeated",
    )
    add("--resume", action="store_true", help="leave out what the file has of this commit already")
    add("--rounds", type=int, default=20, metavar="R", help="of the race (default: 20)")
    add(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="for all parts but the race: these backends alone; may be repeated",
    )
    add("--quick", action="store_true", help="a few small points of each, to see that it works")
    add("--cpu", action="store_true", help=argparse.SUPPRESS)
    return parser


def _is_there(card: Card, name: str) -> bool:
    """Whether a file has a part, measured with the code as it is."""
    part = card if name == RACE else card.get("parts", {}).get(name, {})
    measured_at = part.get("machine_info", {}).get("commit")
    return measured_at is not None and measured_at == machine.commit()


def _race(card: Card, rounds: int, is_quick: bool) -> tuple[Card, bool]:
    """The card with a new race, its other parts kept; and whether every backend was right."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "race.json"
        selection = ["--workload", "all", "--warm"] if torch.cuda.is_available() else []
        if is_quick:
            selection = ["--workload", "captured"]
        status = race.main([*selection, "--rounds", str(rounds), "--out", str(out)])
        raced: Card = json.loads(out.read_text())
    if "parts" in card:
        raced["parts"] = card["parts"]
    return raced, status == 0


if __name__ == "__main__":
    sys.exit(main())
