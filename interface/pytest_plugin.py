"""Load the conformance suite's options only in a pytest run that names flash_rosetta.

Installed projects all load every `pytest11` plugin, and another project may have a `--backend` of
its own; so this one does nothing unless an argument asks for the suite.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, args):
    if any(arg.startswith("flash_rosetta") for arg in args):
        early_config.pluginmanager.import_plugin("flash_rosetta.conformance.plugin")
