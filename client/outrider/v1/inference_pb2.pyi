from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "sampling", "speculation", "resume_token_ids", "request_class", "adapter", "cache_salt", "model", "merge_deltas")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MERGE_DELTAS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: _common_pb2.Chat
    token_ids: _common_pb2.TokenIds
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationParams
    resume_token_ids: _common_pb2.TokenIds
    request_class: str
    adapter: str
    cache_salt: str
    model: str
    merge_deltas: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[_common_pb2.Chat, _Mapping]] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., resume_token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., request_class: _Optional[str] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., model: _Optional[str] = ..., merge_deltas: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "drafter", "request_class", "numerics_class", "model", "route_reason", "verification", "draft_length", "prompt_tokens", "effective_temperature", "trace_id", "approximate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    drafter: str
    request_class: str
    numerics_class: str
    model: str
    route_reason: str
    verification: _common_pb2.Verification
    draft_length: int
    prompt_tokens: int
    effective_temperature: float
    trace_id: str
    approximate: bool
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., drafter: _Optional[str] = ..., request_class: _Optional[str] = ..., numerics_class: _Optional[str] = ..., model: _Optional[str] = ..., route_reason: _Optional[str] = ..., verification: _Optional[_Union[_common_pb2.Verification, str]] = ..., draft_length: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., effective_temperature: _Optional[float] = ..., trace_id: _Optional[str] = ..., approximate: _Optional[bool] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("choices", "usage", "speculation", "timing", "trace_id", "attempts")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChoiceFinish]
    usage: _common_pb2.Usage
    speculation: _common_pb2.SpeculationReport
    timing: _common_pb2.Timing
    trace_id: str
    attempts: int
    def __init__(self, choices: _Optional[_Iterable[_Union[_common_pb2.ChoiceFinish, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationReport, _Mapping]] = ..., timing: _Optional[_Union[_common_pb2.Timing, _Mapping]] = ..., trace_id: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...
