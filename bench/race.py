"""`flash-rosetta race`: the backends against PyTorch's own attention, correct before fast."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"

DESCRIPTION = """\
Race the registered backends against PyTorch's scaled_dot_product_attention, each of its kernels
forced and named, on the same tensors. Every contender is first judged against an fp64 oracle; one
that is wrong gets no number. Without a GPU the race is about correctness alone."""


def main(argv: list[str] | None = None) -> int:
    """Run the race. 0: every backend that could run was right; 1: one was not; 2: bad usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if find_spec("pytest_benchmark") is None or find_spec("safetensors") is None:
        parser.error("the race needs more packages: pip install 'flash-rosetta[bench]'")

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when Triton is imported
        if arguments.workload in ("grid", "named"):
            parser.error(
                f"--workload {arguments.workload} needs a GPU; this machine can race "
                "--workload captured"
            )
    if arguments.save:
        _check_save(parser, arguments, torch.cuda.is_available())

    from rich.console import Console

    from flash_rosetta.bench import card as cards
    from flash_rosetta.bench.plugin import WIDTH, RaceOptions, RacePlugin
    from flash_rosetta.bench.warm import SWITCHES
    from flash_rosetta.bench.workloads import DIRECTIONS

    is_gpu = torch.cuda.is_available()
    directions = {
        None: DIRECTIONS if is_gpu else DIRECTIONS[:2],
        "both": DIRECTIONS[:2],
        "all": DIRECTIONS,
    }
    options = RaceOptions(
        workload=arguments.workload,
        backends=tuple(arguments.backend),
        against=tuple(arguments.against),
        directions=directions.get(arguments.direction, (arguments.direction,)),
        head_dims=tuple(arguments.head_dim),
        seqlens=tuple(arguments.seqlen),
        rounds=arguments.rounds,
    )
    console = Console()
    if torch.cuda.is_available() and console.width < WIDTH:
        console.width = WIDTH
    race = RacePlugin(options, console)
    try:
        race.entrants()
    except ValueError as error:
        parser.error(str(error))
    console.print(_headline(race.device), highlight=False)
    if arguments.warm and is_gpu:
        os.environ.update(SWITCHES)
        race.warm()
    status = _pytest(race)
    console.print(race.tables())
    for entrant, outcome in race.failures():
        console.print(f"{outcome.verdict.upper()}: {entrant.id}", style="red", highlight=False)
    out = arguments.out
    if race.output_json is not None and arguments.save:
        out = RESULTS / f"{cards.slug(race.output_json['machine_info']['card'])}.json"
        if out.exists():
            race.output_json["parts"] = cards.read(out).get("parts", {})
    if race.output_json is not None and out is not None:
        cards.write(race.output_json, out)
        console.print(f"wrote {out}", highlight=False)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-rosetta race",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--workload",
        choices=("captured", "grid", "named", "all"),
        default="captured",
        help="inputs captured from a real model (default), a grid of sizes or those of named "
        "models (GPU only), or all of them",
    )
    add(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a registered backend; may be repeated (default: all that can run)",
    )
    add(
        "--against",
        action="append",
        default=[],
        metavar="NAME",
        help="sdpa-default, -cudnn, -flash, -efficient or -math, flash-attn-4 or flex; may be "
        "repeated (default: all of those installed, flex at a few sizes)",
    )
    add(
        "--direction",
        choices=("forward", "backward", "forward+backward", "both", "all"),
        help="one of them (forward+backward: through autograd), the first two, or all (default; "
        "without a GPU both)",
    )
    add("--head-dim", action="append", default=[], type=int, metavar="D", help="may be repeated")
    add("--seqlen", action="append", default=[], type=int, metavar="N", help="may be repeated")
    add(
        "--rounds",
        type=_rounds,
        metavar="R",
        help="timed rounds of each contender (default: what fits into 0.25 s, 10 to 100)",
    )
    add(
        "--warm",
        action="store_true",
        help="first compile all kernels in parallel, into the caches on disk",
    )
    add("--out", type=Path, metavar="FILE", help="write pytest-benchmark JSON there")
    add(
        "--save",
        action="store_true",
        help="write bench/results/CARD.json in this checkout, and keep the parts beside the race "
        "that it has; needs --workload all, unfiltered",
    )
    return parser


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2 for quartiles, got {rounds}")
    return rounds


def _check_save(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, has_gpu: bool
) -> None:
    """A committed file is a whole race on a GPU, or it would replace more than it holds."""
    filters = arguments.head_dim or arguments.seqlen or arguments.against or arguments.direction
    if not has_gpu:
        parser.error("--save needs a GPU: a race on a CPU has no times worth keeping; use --out")
    if arguments.workload != "all" or filters:
        parser.error("--save keeps whole races: give --workload all and no filter, or use --out")
    if not RESULTS.is_dir():
        parser.error(f"--save needs a checkout, and {RESULTS} does not exist; use --out")


def _headline(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return f"[bold]Race on {torch.cuda.get_device_name(device)}[/], torch {torch.__version__}"
    return (
        "[bold]No GPU here: correctness only, no speed claims.[/] "
        f"CPU kernels and Triton's interpreter, torch {torch.__version__}"
    )


def _pytest(race: Any) -> int:
    """Run the race's tests with pytest-benchmark, undisturbed by the user's pytest settings."""
    import pytest

    with tempfile.TemporaryDirectory() as folder, _without_variable("PYTEST_ADDOPTS"):
        status = pytest.main(
            [
                str(HERE / "test_race.py"),
                "-c",
                os.devnull,
                f"--rootdir={HERE}",
                "--import-mode=importlib",
                "--capture=no",
                "-p",
                "no:terminal",
                "-p",
                "no:cacheprovider",
                "-p",
                "benchmark",
                "--benchmark-quiet",
                f"--benchmark-json={Path(folder) / 'race.json'}",
            ],
            plugins=[race],
        )
    return int(status)


@contextlib.contextmanager
def _without_variable(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
