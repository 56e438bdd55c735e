"""The numerics class: all that decides the bits of a logit.

Two workers of one class compute equal bits for equal tokens; the hand-off, the prefix hash, the
ticket and the reply carry its digest.
"""

import hashlib
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """The fields of one class. `row_padding` is the engine's row plan, such as `pad=1,max=32`."""

    model_revision: str
    dtype: str
    kv_dtype: str
    device: str
    instruction_set: str
    kernels: str
    row_padding: str
    quantisation: str = "none"
    tensor_parallel: int = 1
    pipeline_split: str = "none"

    def as_fields(self) -> dict[str, str]:
        """Name → value, for handshakes and error messages."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    def digest(self) -> str:
        """16 hex digits over all fields."""
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.as_fields().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first field, by name, in which two classes differ, or None."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name
    return None
