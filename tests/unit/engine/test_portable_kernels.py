"""The kernels' portable form (no AVX-512) builds, and computes what this machine's form computes."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from engine import native
from engine.huge_pages import advise_huge_pages
from engine.native import NativeKernels, NativeUnavailable, load_kernels
from engine.pointwise import NativePointwise, TorchPointwise

_SOURCES = Path(native.__file__).parent / "kernels"


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    target = tmp_path_factory.mktemp("kernels") / "portable.so"
    sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        *sources,
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return NativeKernels(ctypes.CDLL(str(target)), "portable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_and_built_kernels_agree_with_torch(portable: NativeKernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(5, 96, generator=generator).to(dtype)
    delta = torch.randn(5, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    gate_up = (torch.randn(5, 192, generator=generator) * 30).to(dtype)
    plain = TorchPointwise(1e-5)
    sums = residual.clone()
    normed, activated = plain.add_norm(sums, delta, weight), plain.silu_multiply(gate_up)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    for kernels in (portable, load_kernels()):
        ours = NativePointwise(kernels, dtype, 1e-5)
        our_sums = residual.clone()
        assert torch.allclose(ours.add_norm(our_sums, delta, weight), normed, rtol=tolerance, atol=tolerance)
        assert torch.equal(our_sums, sums)
        assert torch.allclose(ours.silu_multiply(gate_up), activated, rtol=tolerance, atol=tolerance)


def test_a_second_load_takes_the_library_that_is_there() -> None:
    assert load_kernels() is load_kernels()


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_COMPILER", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match="no-such-compiler cannot be run"):
        load_kernels.__wrapped__()


def test_the_process_has_one_openmp_pool() -> None:
    load_kernels()
    maps = Path("/proc/self/maps").read_text()
    pools = {line.split()[-1] for line in maps.splitlines() if "gomp" in line or "libiomp" in line}
    assert len(pools) == 1


def test_huge_pages_are_advised_for_large_tensors_only() -> None:
    assert not advise_huge_pages(torch.empty(1000))
    large = torch.empty(4 * 2**20, dtype=torch.float32)
    if advise_huge_pages(large):
        large.fill_(1.0)
        assert float(large.sum()) == large.numel()
