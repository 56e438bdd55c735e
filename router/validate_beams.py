"""Beam search: its own fields, and which others it cannot honour (DESIGN §8: refused, never ignored)."""

import math

from core.errors import InvalidArgument
from core.records import EarlyStopping
from core.wire import early_stopping_from_wire
from outrider.v1 import common_pb2, inference_pb2

MAX_LENGTH_PENALTY = 10.0
DRAFTERS = ("", "auto", "none")


def check_beam_search(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidArgument naming the first field that does not go with the request's `beam_width`.

    A search looks for the likeliest answer: it draws nothing, drafts nothing, gives one answer and cannot be resumed
    in its middle. A `temperature`, `top_k`, `top_p` or `min_p` that is given as off, and n = 1, say nothing else.
    """
    sampling, speculation = request.sampling, request.speculation
    if not sampling.HasField("beam_width") or sampling.beam_width == 1:
        for name, given in (
            ("length_penalty", sampling.HasField("length_penalty")),
            ("early_stopping", sampling.early_stopping != common_pb2.EARLY_STOPPING_UNSPECIFIED),
        ):
            if given:
                raise InvalidArgument(f"sampling.{name}", "is for beam search: it needs a beam_width above 1")
        return
    unfit = {
        "sampling.temperature": sampling.temperature != 0.0,
        "sampling.top_k": sampling.top_k != 0,
        "sampling.top_p": sampling.HasField("top_p") and sampling.top_p != 1.0,
        "sampling.min_p": sampling.min_p != 0.0,
        "sampling.seed": sampling.HasField("seed"),
        "sampling.n": sampling.HasField("n") and sampling.n != 1,
        "sampling.grammar": sampling.WhichOneof("grammar") is not None,
        "speculation.drafter": speculation.drafter not in DRAFTERS,
        "speculation.draft_length": speculation.HasField("draft_length"),
        "speculation.draft_width": speculation.HasField("draft_width"),
        "speculation.verification": speculation.verification
        not in (common_pb2.VERIFICATION_UNSPECIFIED, common_pb2.VERIFICATION_INVARIANT),
        "resume_token_ids": bool(request.resume_token_ids.ids),
    }
    for field, given in unfit.items():
        if given:
            raise InvalidArgument(field, "does not go with beam search (sampling.beam_width above 1)")


def check_length_penalty(message: common_pb2.SamplingParams) -> float:
    """1 where absent. Negative ones favour short answers."""
    value = message.length_penalty if message.HasField("length_penalty") else 1.0
    if not math.isfinite(value) or abs(value) > MAX_LENGTH_PENALTY:
        raise InvalidArgument(
            "sampling.length_penalty", f"must be -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}, got {value}"
        )
    return value


def check_early_stopping(message: common_pb2.SamplingParams) -> EarlyStopping:
    """False where absent."""
    if message.early_stopping not in common_pb2.EarlyStopping.values():
        raise InvalidArgument("sampling.early_stopping", f"{message.early_stopping} is not known")
    return early_stopping_from_wire(message.early_stopping)
