"""Models for parity: tiny random Llamas of several shapes, and the real one."""

from pathlib import Path

import pytest

from tests.bench.prompts import model_directory
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, grouped heads of 16."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The real model's directory."""
    return model_directory()
