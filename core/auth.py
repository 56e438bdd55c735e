"""Who may call us: one bearer token for the deployment, deny by default.

Without a token only a loopback address may be listened on. The gRPC side is `core/grpc_auth.py`.
"""

import hmac
import ipaddress

from core.errors import FailedPrecondition, InvalidArgument, Unauthenticated

AUTHORIZATION = "authorization"
_SCHEME = "bearer "


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` (`[V6]:PORT` for IPv6) as host and port. Raises InvalidArgument naming `listen`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument("listen", f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_bind(address: str, bearer_token: str | None) -> None:
    """Raises FailedPrecondition where `address` is open to others and no token guards it."""
    host, _ = split_address(address)
    if bearer_token is None and not is_loopback(host):
        raise FailedPrecondition(
            "listen",
            f"{address} is open beyond loopback, which needs a bearer token: "
            "set OUTRIDER_TOKEN or security.bearer_token",
        )


def bearer_metadata(bearer_token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that a caller sends; empty without a token."""
    return () if bearer_token is None else ((AUTHORIZATION, f"Bearer {bearer_token}"),)


def check_bearer(header: str | None, bearer_token: str) -> None:
    """Raises Unauthenticated unless `header` carries the token. Takes the same time wherever they differ."""
    if header is None or not header.lower().startswith(_SCHEME):
        raise Unauthenticated("a bearer token is needed")
    given = header[len(_SCHEME) :].strip().encode()
    if not hmac.compare_digest(given, bearer_token.encode()):
        raise Unauthenticated("unknown bearer token")
