from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillPeer(_message.Message):
    __slots__ = ("worker_id", "epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class ThinkingPace(_message.Message):
    __slots__ = ("draft_length", "opening", "closing")
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    draft_length: int
    opening: str
    closing: str
    def __init__(self, draft_length: _Optional[int] = ..., opening: _Optional[str] = ..., closing: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("index", "token_ids", "finished")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("ticket", "token_ids", "sampling", "speculation", "draft_length_fixed", "committed", "prefill_peers", "request_class", "bad_word_ids", "eos_token_ids", "merge_deltas", "thinking", "auto_drafters")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIXED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PEERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MERGE_DELTAS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    AUTO_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    speculation: _common_pb2.SpeculationParams
    draft_length_fixed: bool
    committed: _containers.RepeatedCompositeFieldContainer[Committed]
    prefill_peers: _containers.RepeatedCompositeFieldContainer[PrefillPeer]
    request_class: str
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenIds]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    merge_deltas: bool
    thinking: ThinkingPace
    auto_drafters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_common_pb2.SpeculationParams, _Mapping]] = ..., draft_length_fixed: _Optional[bool] = ..., committed: _Optional[_Iterable[_Union[Committed, _Mapping]]] = ..., prefill_peers: _Optional[_Iterable[_Union[PrefillPeer, _Mapping]]] = ..., request_class: _Optional[str] = ..., bad_word_ids: _Optional[_Iterable[_Union[_common_pb2.TokenIds, _Mapping]]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., merge_deltas: _Optional[bool] = ..., thinking: _Optional[_Union[ThinkingPace, _Mapping]] = ..., auto_drafters: _Optional[_Iterable[str]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: DecodeStarted
    delta: DecodeDelta
    finished: DecodeFinished
    def __init__(self, started: _Optional[_Union[DecodeStarted, _Mapping]] = ..., delta: _Optional[_Union[DecodeDelta, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ...) -> None: ...

class DecodeStarted(_message.Message):
    __slots__ = ("cached_prompt_tokens", "drafter")
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    cached_prompt_tokens: int
    drafter: str
    def __init__(self, cached_prompt_tokens: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class DecodeDelta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "report", "finish")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    report: _common_pb2.SpeculationReport
    finish: _common_pb2.ChoiceFinish
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., report: _Optional[_Union[_common_pb2.SpeculationReport, _Mapping]] = ..., finish: _Optional[_Union[_common_pb2.ChoiceFinish, _Mapping]] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("choices", "usage", "report", "timing", "handoff")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChoiceFinish]
    usage: _common_pb2.Usage
    report: _common_pb2.SpeculationReport
    timing: _common_pb2.Timing
    handoff: HandoffReport
    def __init__(self, choices: _Optional[_Iterable[_Union[_common_pb2.ChoiceFinish, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., report: _Optional[_Union[_common_pb2.SpeculationReport, _Mapping]] = ..., timing: _Optional[_Union[_common_pb2.Timing, _Mapping]] = ..., handoff: _Optional[_Union[HandoffReport, _Mapping]] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("outcome", "transport", "bytes", "blocks", "prefill_worker_id")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    transport: str
    bytes: int
    blocks: int
    prefill_worker_id: str
    def __init__(self, outcome: _Optional[str] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., prefill_worker_id: _Optional[str] = ...) -> None: ...
