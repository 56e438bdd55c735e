"""Flat import names are safe only while nobody else in the environment has one of them."""

import importlib.metadata
import importlib.util
import site
from pathlib import Path

import pytest

from tests.contract.sources import PACKAGES, ROOT

NAMES = (*PACKAGES, "outrider")


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves_to_our_folder(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve().is_relative_to(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_no_installed_distribution_brings_the_name(name: str) -> None:
    ours = {"outrider", "outrider-client"}
    owners = set(importlib.metadata.packages_distributions().get(name, []))
    assert owners <= ours
    for folder in map(Path, site.getsitepackages()):
        assert not (folder / name).exists()
        assert not list(folder.glob(f"{name}.*py*"))
