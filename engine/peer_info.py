"""What a worker tells its peers of its engine, for the handshake and for status."""

from core.identity import WorkerIdentity
from core.numerics import NumericsClass
from core.peer import CACHE_FORMAT_VERSION, TRANSPORTS
from engine.kv_layout import KvLayout
from outrider.v1 import common_pb2


def dtype_name(layout: KvLayout) -> str:
    """The name of the KV dtype on the wire, such as `bfloat16`."""
    return str(layout.dtype).removeprefix("torch.")


def describe_peer(identity: WorkerIdentity, layout: KvLayout, numerics: NumericsClass) -> common_pb2.PeerInfo:
    """The PeerInfo of one worker; constant for its life."""
    return common_pb2.PeerInfo(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        numerics_class=numerics.digest(),
        numerics_fields=numerics.as_fields(),
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        hidden_dim=layout.hidden_dim,
        kv_dtype=dtype_name(layout),
        hidden_layers=layout.hidden_layers,
        tensor_parallel=numerics.tensor_parallel,
        cache_format_version=CACHE_FORMAT_VERSION,
        transports=TRANSPORTS,
        model_revision=numerics.model_revision,
    )
