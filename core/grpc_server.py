"""How every gRPC server of ours is made: options from one place, bearer tokens, health, clear bind errors."""

import socket
from dataclasses import dataclass, field
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from core.auth import require_safe_bind, split_address
from core.errors import FailedPrecondition
from core.grpc_auth import BearerInterceptor
from core.grpc_options import server_options
from core.settings import GrpcSettings

_NOT_BOUND: Final = "the port is in use, or the host is not this machine"


@dataclass(slots=True)
class RpcServer:
    """A server and its health. `bind`, add servicers, `start`, `set_ready(True)`; at the end `stop`."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    bearer_token: str | None
    address: str = ""
    _ready: bool = field(default=False)

    @property
    def ready(self) -> bool:
        """What the health service answers."""
        return self._ready

    def bind(self, address: str) -> str:
        """Binds `HOST:PORT` (0: any port) and returns the bound address; nobody is answered before `start`.

        Raises FailedPrecondition naming `listen` where the address is taken, or open without a token.
        """
        require_safe_bind(address, self.bearer_token)
        host, _port = split_address(address)
        try:
            bound = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise FailedPrecondition("listen", f"cannot bind {address}: {_NOT_BOUND}") from error
        if bound == 0:
            raise FailedPrecondition("listen", f"cannot bind {address}: {_NOT_BOUND}")
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        return self.address

    async def start(self) -> None:
        """Answers from now on, not ready yet. All servicers are on `server` by now."""
        await self.set_ready(False)
        await self.server.start()

    async def listen(self, address: str) -> str:
        """`bind` and `start` in one."""
        bound = self.bind(address)
        await self.start()
        return bound

    async def set_ready(self, ready: bool) -> None:
        """What the health service answers from now on."""
        self._ready = ready
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set("", serving if ready else not_serving)

    async def stop(self, grace_s: float) -> None:
        """Not ready at once, no new calls, running ones may end within `grace_s`, then they are cancelled."""
        await self.set_ready(False)
        await self.server.stop(grace_s)


def make_server(settings: GrpcSettings, bearer_token: str | None = None) -> RpcServer:
    """A server that is not bound yet. Without a token it can only listen on loopback."""
    interceptors = [] if bearer_token is None else [BearerInterceptor(bearer_token)]
    server = grpc.aio.server(interceptors=interceptors, options=server_options(settings))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return RpcServer(server=server, health=servicer, bearer_token=bearer_token)


def require_free(address: str) -> None:
    """Raises FailedPrecondition naming `listen` where `HOST:PORT` cannot be bound now."""
    host, port = split_address(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise FailedPrecondition("listen", f"cannot bind {address}: {_NOT_BOUND}") from error
