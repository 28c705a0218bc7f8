"""The command line: `flash-rosetta COMMAND`, the same as `python -m flash_rosetta COMMAND`."""

from __future__ import annotations

import os
import sys
from importlib import import_module

COMMANDS = {
    "info": ("flash_rosetta.info", "this machine, each backend, and every reason why not"),
    "race": ("flash_rosetta.bench.race", "time the backends against PyTorch's own attention"),
    "measure": ("flash_rosetta.bench.measure", "all that the report of a card has, by one command"),
    "report": (
        "flash_rosetta.bench.report_command",
        "results as Markdown, as plots, as one page",
    ),
    "compare": ("flash_rosetta.bench.compare", "two results: what changed, and what is noise"),
    "train": ("flash_rosetta.bench.train", "train a small GPT with a backend's attention"),
    "conformance": ("flash_rosetta.conformance.__main__", "judge a backend: --backend NAME"),
    "trace": ("flash_rosetta.reference.trace", "follow the algorithm by hand on eight tokens"),
    "explain-io": ("flash_rosetta.reference.io", "count what each algorithm moves through memory"),
}
"""The module whose `main(argv)` runs a command, imported when it is asked for, and a summary."""

EXAMPLES = """\
examples:
  flash-rosetta info
  flash-rosetta race
  flash-rosetta conformance --backend triton -k causal
  flash-rosetta COMMAND --help"""


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (sys.argv[1:] if left out) names; returns the exit status."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left, as `| head` does. Python flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name == "--version":
        from flash_rosetta.machine import package_version

        print(f"flash-rosetta {package_version('flash-rosetta')}")
        return 0
    if name not in COMMANDS:
        print(
            f"flash-rosetta: the command must be one of {', '.join(COMMANDS)}; got {name!r}",
            file=sys.stderr,
        )
        return 2
    status: int = import_module(COMMANDS[name][0]).main(rest)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: flash-rosetta [--help] [--version] COMMAND ...",
            "",
            "FlashAttention, forward and backward: one reference, several kernel languages.",
            "",
            "commands:",
            *lines,
            "",
            EXAMPLES,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
