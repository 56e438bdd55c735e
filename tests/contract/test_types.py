"""Types are complete, and mypy agrees with them."""

import subprocess
import sys

import pytest

from tests.contract.sources import ROOT


@pytest.mark.timeout(400)
def test_mypy_has_nothing_to_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"],
        cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
