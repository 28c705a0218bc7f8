"""The conformance suite: what every backend must do, judged against the reference in fp64.

`pytest --pyargs flash_rosetta.conformance --backend NAME` runs it on any registered backend, a
third party's included; so does `flash-rosetta conformance --backend NAME`.
"""

import pytest

pytest.register_assert_rewrite(
    "flash_rosetta.conformance.checks", "flash_rosetta.conformance.planting"
)
