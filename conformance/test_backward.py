"""dq, dk and dv of every case against the oracle, and how gradients may be asked for."""

import pytest
import torch

from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import Case


@pytest.mark.gradients
def test_dq_dk_dv(backend: str, case: Case, device: torch.device):
    checks.solves(backend, case, device, gradients=("dq", "dk", "dv"))
