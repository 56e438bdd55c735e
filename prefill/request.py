"""A Fetch's opening message, checked against its ticket and against what this worker can do. Pure."""

from dataclasses import dataclass

from core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from core.peer import TRANSPORTS
from core.prefix_hash import PrefixKey, block_hashes, prompt_digest
from core.records import TicketClaims
from engine.kv_layout import KvLayout
from outrider.v1 import common_pb2, prefill_pb2
from prefill.lease import PromptJob
from prefill.planes import Span


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """What this worker serves."""

    peer: common_pb2.PeerInfo
    layout: KvLayout
    num_blocks: int
    max_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A request that may be served: the prompt, and which planes of it are wanted."""

    key: tuple[str, int]
    job: PromptJob
    kv: Span
    hidden: Span
    credit_bytes: int


def check_fetch(
    message: prefill_pb2.FetchOpen, claims: TicketClaims, limits: ServedLimits, deadline_s: float | None
) -> FetchRequest:
    """Raises InvalidArgument, FailedPrecondition or PermissionDenied, naming the field."""
    _check_claims(claims, limits.peer)
    token_ids = tuple(message.token_ids)
    _check_prompt(token_ids, limits)
    if claims.prompt_digest != prompt_digest(token_ids):
        raise PermissionDenied("ticket: it was made for another prompt")
    if message.transport not in TRANSPORTS:
        raise FailedPrecondition("transport", f"{message.transport!r}, known: {', '.join(TRANSPORTS)}")
    layout = limits.layout
    kv = Span(message.kv_range.start, message.kv_range.end)
    if not 0 <= kv.start < kv.end == len(token_ids):
        raise InvalidArgument("kv_range", f"{kv.start}..{kv.end} of {len(token_ids)} tokens")
    hidden = Span(message.hidden_range.start, message.hidden_range.end)
    if not 0 <= hidden.start <= hidden.end <= len(token_ids):
        raise InvalidArgument("hidden_range", f"{hidden.start}..{hidden.end} of {len(token_ids)} tokens")
    if hidden.start < hidden.end and not layout.hidden_layers:
        raise InvalidArgument("hidden_range", "this deployment keeps no hidden planes")
    prefix_key = PrefixKey(claims.numerics_class, claims.cache_salt, claims.adapter, layout.hidden_layers)
    hashes = block_hashes(token_ids, layout.block_size, prefix_key)
    job = PromptJob(token_ids, hashes, deadline_s)
    return FetchRequest((claims.request_id, claims.attempt), job, kv, hidden, message.credit_bytes)


def _check_claims(claims: TicketClaims, peer: common_pb2.PeerInfo) -> None:
    if peer.worker_id not in claims.prefill_worker_ids:
        raise PermissionDenied(f"ticket: it does not allow {peer.worker_id}")
    if claims.model_revision != peer.model_revision:
        raise FailedPrecondition(
            "model_revision", f"the ticket says {claims.model_revision}, here is {peer.model_revision}"
        )
    if claims.numerics_class != peer.numerics_class:
        raise FailedPrecondition(
            "numerics_class", f"the ticket says {claims.numerics_class}, here is {peer.numerics_class}"
        )
    if claims.adapter:
        raise InvalidArgument("adapter", f"{claims.adapter!r} is not served here")


def _check_prompt(token_ids: tuple[int, ...], limits: ServedLimits) -> None:
    if not token_ids:
        raise InvalidArgument("token_ids", "the prompt is empty")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidArgument("token_ids", f"{wrong} is not in the vocabulary of {limits.vocab_size}")
    if len(token_ids) > limits.max_context:
        raise InvalidArgument(
            "token_ids", f"a prompt of {len(token_ids)} tokens, the context has {limits.max_context}"
        )
    num_blocks = limits.layout.blocks_for(len(token_ids))
    if num_blocks > limits.num_blocks:
        raise InvalidArgument(
            "token_ids",
            f"a prompt of {len(token_ids)} tokens takes {num_blocks} blocks, the pool has {limits.num_blocks}",
        )
