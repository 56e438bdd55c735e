"""The bearer token on gRPC: a server interceptor that denies by default."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from core.auth import AUTHORIZATION, check_bearer
from core.errors import Unauthenticated

Request = TypeVar("Request")
Response = TypeVar("Response")

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Probes of a cluster carry no credentials, and health tells nothing but up or down."""


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call without the token, save health checks."""

    def __init__(self, bearer_token: str) -> None:
        self._bearer_token = bearer_token

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """Called by gRPC once a call, before its handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        header = dict(handler_call_details.invocation_metadata or ()).get(AUTHORIZATION)
        try:
            check_bearer(header if isinstance(header, str) else None, self._bearer_token)
        except Unauthenticated as error:
            return _refusal(handler, error.message)
        return handler


def _refusal(
    handler: grpc.RpcMethodHandler[Request, Response], message: str
) -> grpc.RpcMethodHandler[Request, Response]:
    """A handler of the same shape as `handler` that only refuses."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Request, Response]) -> Response:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        raise AssertionError("abort returned")

    async def refuse_stream(
        _: object, context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        yield await refuse(_, context)

    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse_stream)
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
