from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaneKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANE_KIND_UNSPECIFIED: _ClassVar[PlaneKind]
    PLANE_KIND_KEY: _ClassVar[PlaneKind]
    PLANE_KIND_VALUE: _ClassVar[PlaneKind]
    PLANE_KIND_HIDDEN: _ClassVar[PlaneKind]
PLANE_KIND_UNSPECIFIED: PlaneKind
PLANE_KIND_KEY: PlaneKind
PLANE_KIND_VALUE: PlaneKind
PLANE_KIND_HIDDEN: PlaneKind

class HandshakeRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: _common_pb2.PeerInfo
    def __init__(self, peer: _Optional[_Union[_common_pb2.PeerInfo, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: _common_pb2.PeerInfo
    def __init__(self, peer: _Optional[_Union[_common_pb2.PeerInfo, _Mapping]] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class FetchUp(_message.Message):
    __slots__ = ("open", "credit", "acknowledge")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    open: FetchOpen
    credit: Credit
    acknowledge: Acknowledge
    def __init__(self, open: _Optional[_Union[FetchOpen, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ...) -> None: ...

class FetchOpen(_message.Message):
    __slots__ = ("ticket", "token_ids", "kv_range", "hidden_range", "transport", "credit_bytes")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_RANGE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_RANGE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_range: TokenRange
    hidden_range: TokenRange
    transport: str
    credit_bytes: int
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., kv_range: _Optional[_Union[TokenRange, _Mapping]] = ..., hidden_range: _Optional[_Union[TokenRange, _Mapping]] = ..., transport: _Optional[str] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("checksum",)
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    def __init__(self, checksum: _Optional[int] = ...) -> None: ...

class FetchDown(_message.Message):
    __slots__ = ("announce", "chunk", "commit")
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    announce: Announce
    chunk: Chunk
    commit: Commit
    def __init__(self, announce: _Optional[_Union[Announce, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("num_tokens", "cached_tokens", "peer")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    cached_tokens: int
    peer: _common_pb2.PeerInfo
    def __init__(self, num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., peer: _Optional[_Union[_common_pb2.PeerInfo, _Mapping]] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("kind", "layer", "head_start", "head_end", "token_start", "token_end", "data", "crc32")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    kind: PlaneKind
    layer: int
    head_start: int
    head_end: int
    token_start: int
    token_end: int
    data: bytes
    crc32: int
    def __init__(self, kind: _Optional[_Union[PlaneKind, str]] = ..., layer: _Optional[int] = ..., head_start: _Optional[int] = ..., head_end: _Optional[int] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("planes",)
    PLANES_FIELD_NUMBER: _ClassVar[int]
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    def __init__(self, planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("logits", "logits_crc32", "num_tokens", "num_planes", "num_bytes", "checksum", "prefill_s")
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    logits: bytes
    logits_crc32: int
    num_tokens: int
    num_planes: int
    num_bytes: int
    checksum: int
    prefill_s: float
    def __init__(self, logits: _Optional[bytes] = ..., logits_crc32: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_planes: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., prefill_s: _Optional[float] = ...) -> None: ...
