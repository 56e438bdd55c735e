"""Bearer tokens: who may call, where one may listen."""

import pytest

from core.auth import bearer_metadata, check_bearer, require_safe_bind, split_address
from core.errors import FailedPrecondition, InvalidArgument, Unauthenticated


def test_the_right_token_passes_in_any_spelling_of_the_scheme() -> None:
    check_bearer("Bearer open sesame", "open sesame")
    check_bearer("bearer open sesame", "open sesame")


@pytest.mark.parametrize("header", [None, "", "open sesame", "Basic open sesame", "Bearer ", "Bearer open"])
def test_anything_else_is_unauthenticated(header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        check_bearer(header, "open sesame")


def test_what_a_caller_sends_is_what_a_server_takes() -> None:
    ((name, value),) = bearer_metadata("token")
    assert name == "authorization"
    check_bearer(value, "token")
    assert bearer_metadata(None) == ()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.9.10:1"])
def test_loopback_needs_no_token(address: str) -> None:
    require_safe_bind(address, None)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "example.org:1"])
def test_beyond_loopback_needs_a_token_and_the_refusal_says_how(address: str) -> None:
    with pytest.raises(FailedPrecondition, match="OUTRIDER_TOKEN"):
        require_safe_bind(address, None)
    require_safe_bind(address, "token")


@pytest.mark.parametrize("address", ["", "localhost", ":1", "host:", "host:port", "host:70000"])
def test_a_malformed_address_is_refused_naming_listen(address: str) -> None:
    with pytest.raises(InvalidArgument, match="listen"):
        split_address(address)
