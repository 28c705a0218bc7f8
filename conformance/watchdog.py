"""Turns a hang into a failure."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 20
"""Seconds between a test's limit and the end of the process, in which a softer way out may work."""


class Watchdog:
    """Ends the process when the block it guards takes too long.

    A kernel that never ends holds its thread in a driver call, where neither a signal handler nor
    pytest-timeout gets a turn; faulthandler's own thread does. Says so on the stderr of the time of
    its creation, which pytest has not captured yet.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else None

    def close(self) -> None:
        if self.stderr is not None:
            os.close(self.stderr)
            self.stderr = None

    @contextmanager
    def guard(self, what: str, limit_s: float) -> Iterator[None]:
        """Print `what` and every thread's traceback, and exit with status 1, after the limit."""
        if self.stderr is None:
            yield
            return
        message = f"\nflash-rosetta: {what} hangs, it took over {limit_s:g} s; giving up\n"
        notice = threading.Timer(
            limit_s + self.grace_s / 2, os.write, (self.stderr, message.encode())
        )
        notice.daemon = True
        notice.start()
        faulthandler.dump_traceback_later(limit_s + self.grace_s, exit=True, file=self.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            notice.cancel()
