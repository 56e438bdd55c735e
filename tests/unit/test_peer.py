"""Workers that differ in anything that decides the bits of KV refuse each other, by field (CASES B30)."""

from collections.abc import Callable

import pytest

from core.errors import FailedPrecondition
from core.numerics import NumericsClass
from core.peer import TRANSPORTS, require_compatible
from outrider.v1 import common_pb2


def numerics(**changes: object) -> NumericsClass:
    values: dict[str, object] = {
        "model_revision": "r1",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "device": "cpu",
        "instruction_set": "avx512",
        "kernels": "native-1",
        "row_padding": "pad=1,max=32",
        **changes,
    }
    return NumericsClass(**values)  # type: ignore[arg-type]  # the fields are those of the class


def peer(worker_id: str = "decode-0", numerics_class: NumericsClass | None = None) -> common_pb2.PeerInfo:
    numerics_class = numerics_class or numerics()
    return common_pb2.PeerInfo(
        worker_id=worker_id,
        epoch=worker_id,
        numerics_class=numerics_class.digest(),
        numerics_fields=numerics_class.as_fields(),
        block_size=16,
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        hidden_dim=576,
        kv_dtype="bfloat16",
        hidden_layers=(1, 15),
        tensor_parallel=1,
        cache_format_version=1,
        transports=TRANSPORTS,
        model_revision="r1",
    )


def set_field(name: str, value: object) -> Callable[[common_pb2.PeerInfo], None]:
    return lambda info: setattr(info, name, value)


DIFFERENCES: dict[str, Callable[[common_pb2.PeerInfo], None]] = {
    "kv_dtype": set_field("kv_dtype", "float16"),
    "block_size": set_field("block_size", 32),
    "tensor_parallel": set_field("tensor_parallel", 2),
    "num_layers": set_field("num_layers", 24),
    "num_kv_heads": set_field("num_kv_heads", 9),
    "head_dim": set_field("head_dim", 32),
    "hidden_dim": set_field("hidden_dim", 960),
    "hidden_layers": lambda info: info.hidden_layers.append(28),
    "model_revision": set_field("model_revision", "r2"),
    "cache_format_version": set_field("cache_format_version", 2),
    "transports": lambda info: info.transports.__setitem__(0, "collective"),
}


def test_workers_that_differ_in_name_and_epoch_only_are_compatible() -> None:
    require_compatible(peer("decode-0"), peer("prefill-0"))


@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("swapped", [False, True])
def test_each_difference_is_refused_by_name(field: str, swapped: bool) -> None:
    ours, theirs = peer("decode-0"), peer("prefill-0")
    DIFFERENCES[field](theirs)
    with pytest.raises(FailedPrecondition) as refused:
        require_compatible(*((theirs, ours) if swapped else (ours, theirs)))
    assert refused.value.field == field
    assert "decode-0" in refused.value.message
    assert "prefill-0" in refused.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"),
        ("device", "cuda"),
        ("instruction_set", "avx2"),
        ("kernels", "native-2"),
        ("row_padding", "pad=4,max=32"),
        ("quantisation", "int8"),
        ("pipeline_split", "2"),
    ],
)
def test_each_field_of_the_numerics_class_is_refused_by_name(field: str, value: str) -> None:
    theirs = peer("prefill-0", numerics(**{field: value}))
    with pytest.raises(FailedPrecondition) as refused:
        require_compatible(peer(), theirs)
    assert refused.value.field == f"numerics_class.{field}"
    assert value in refused.value.message


def test_another_digest_over_equal_fields_is_refused_too() -> None:
    theirs = peer("prefill-0")
    theirs.numerics_class = "0" * 16
    with pytest.raises(FailedPrecondition) as refused:
        require_compatible(peer(), theirs)
    assert refused.value.field == "numerics_class"
