"""The suite from any directory: `flash-rosetta conformance --backend NAME`."""

from __future__ import annotations

import sys

import pytest

HELP = """\
usage: flash-rosetta conformance [--backend NAME] [--quick] [--problem ID] [PYTEST OPTIONS]
       flash-rosetta conformance --kill-table [--device cpu|cuda]

Judge backends against the reference in fp64. On a GPU they run there; without one the reference
runs on the CPU and Triton in its interpreter, and kernels are compiled for other cards.

  --backend NAME  backend to test; may be repeated or hold a comma list (default: every registered
                  one that can do something on this machine)
  --quick         only the cases that find most faults
  --problem ID    only this problem, by the id that a failure prints
  --kill-table    plant known faults and show which test catches each; --device cuda hunts those
                  that show on a GPU alone
  -k, -x, -v ...  as in pytest: -k forward, -k "edge and d128", --collect-only
"""


def main(argv: list[str] | None = None) -> int:
    """Run the suite on `argv` (sys.argv[1:] if left out), pytest options; returns its status."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    if "--kill-table" in arguments:
        from flash_rosetta.conformance import kill_table

        return kill_table.main([a for a in arguments if a != "--kill-table"])
    # Every module of the suite is imported by then, so that pytest cannot rewrite some of it.
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*ignored, "--pyargs", "flash_rosetta.conformance", *arguments]))


if __name__ == "__main__":
    sys.exit(main())
