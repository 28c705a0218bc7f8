"""o and lse of every case against the oracle."""

import torch

from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import Case


def test_o_and_lse(backend: str, case: Case, device: torch.device):
    checks.solves(backend, case, device)
