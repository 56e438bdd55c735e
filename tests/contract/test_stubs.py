"""The checked-in stubs are what the protos generate."""

import subprocess
import sys
from pathlib import Path

from tests.contract.sources import ROOT, is_generated

STUBS = ROOT / "client" / "outrider" / "v1"


def test_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto" / "outrider" / "v1").glob("*.proto"))
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *map(str, protos)],
        check=True, timeout=60,
    )  # fmt: skip
    fresh = {path.name: path.read_text() for path in (tmp_path / "outrider" / "v1").iterdir()}
    checked_in = {path.name: path.read_text() for path in STUBS.iterdir() if is_generated(path)}
    assert fresh.keys() == checked_in.keys()
    stale = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not stale, f"run `make stubs`: {stale}"
