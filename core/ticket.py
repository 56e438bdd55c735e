"""Signed tickets: the router's word that a decode worker may serve, and fetch, one prompt.

HMAC-SHA256 over the serialised claims. Keys come from the settings, never from Redis; the first
key signs and all of them verify, so that keys can be rotated.
"""

import hashlib
import hmac
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from core.errors import InvalidArgument, PermissionDenied
from core.records import TicketClaims
from outrider.v1 import common_pb2


class TicketKeys:
    """The HMAC keys of a deployment, the signing one first."""

    def __init__(self, hex_keys: Sequence[str]) -> None:
        if not hex_keys:
            raise InvalidArgument("security.ticket_keys", "at least one key is needed")
        self._keys: dict[str, bytes] = {}
        for hex_key in hex_keys:
            try:
                key = bytes.fromhex(hex_key)
            except ValueError as error:
                raise InvalidArgument("security.ticket_keys", "keys are hexadecimal") from error
            if len(key) < 16:
                raise InvalidArgument("security.ticket_keys", "a key has at least 16 bytes")
            self._keys[hashlib.sha256(key).hexdigest()[:8]] = key

    def sign(self, claims: TicketClaims) -> common_pb2.Ticket:
        """A ticket over `claims`, by the first key."""
        key_id, key = next(iter(self._keys.items()))
        payload = _to_message(claims).SerializeToString(deterministic=True)
        signature = hmac.new(key, payload, hashlib.sha256).digest()
        return common_pb2.Ticket(key_id=key_id, claims=payload, signature=signature)

    def verify(self, ticket: common_pb2.Ticket, now_unix_ms: int) -> TicketClaims:
        """The claims of a ticket that one of the keys signed and that is still valid.

        Raises PermissionDenied, without saying which check of the signature failed.
        """
        key = self._keys.get(ticket.key_id, b"")
        expected = hmac.new(key, ticket.claims, hashlib.sha256).digest()
        if not key or not hmac.compare_digest(expected, ticket.signature):
            raise PermissionDenied("ticket: the signature does not hold")
        try:
            message = common_pb2.TicketClaims.FromString(ticket.claims)
        except DecodeError as error:
            raise PermissionDenied("ticket: the claims cannot be read") from error
        if message.expires_unix_ms < now_unix_ms:
            raise PermissionDenied("ticket: expired")
        return _from_message(message)


def _to_message(claims: TicketClaims) -> common_pb2.TicketClaims:
    return common_pb2.TicketClaims(
        request_id=claims.request_id,
        attempt=claims.attempt,
        tenant=claims.tenant,
        prompt_digest=claims.prompt_digest,
        model_revision=claims.model_revision,
        adapter=claims.adapter,
        numerics_class=claims.numerics_class,
        seed=claims.seed,
        decode_worker_id=claims.decode_worker_id,
        decode_epoch=claims.decode_epoch,
        prefill_worker_ids=claims.prefill_worker_ids,
        expires_unix_ms=claims.expires_unix_ms,
        cache_salt=claims.cache_salt,
    )


def _from_message(message: common_pb2.TicketClaims) -> TicketClaims:
    return TicketClaims(
        request_id=message.request_id,
        attempt=message.attempt,
        tenant=message.tenant,
        prompt_digest=message.prompt_digest,
        model_revision=message.model_revision,
        adapter=message.adapter,
        numerics_class=message.numerics_class,
        seed=message.seed,
        decode_worker_id=message.decode_worker_id,
        decode_epoch=message.decode_epoch,
        prefill_worker_ids=tuple(message.prefill_worker_ids),
        expires_unix_ms=message.expires_unix_ms,
        cache_salt=message.cache_salt,
    )
