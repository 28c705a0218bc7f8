"""Ends a run whose GPU is lost, so that one fault does not show as hundreds of failures."""

from __future__ import annotations

import pytest
import torch


def device_error(device: torch.device) -> str | None:
    """What CUDA says against any further work of this process: an error that stays, or None."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


class LostDevice:
    """A pytest plugin: looks at the device after each failure, and stops when it is lost."""

    def __init__(self, device: torch.device):
        self.device = device
        self.session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_failure = report.failed or hasattr(report, "wasxfail")
        if not is_failure or self.session is None or self.session.shouldstop:
            return
        if error := device_error(self.device):
            self.session.shouldstop = (
                f"{report.nodeid} lost the device ({error}), and no test can run in this process "
                f"any more; --deselect '{report.nodeid}' shows what the others find"
            )
