"""Which attention and pointwise kernels run a model's layers here."""

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.attention import Attention
from engine.attention_native import HEAD_DIMS, NativeAttention, rotary_tables
from engine.attention_torch import TorchAttention
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.native import NativeUnavailable, load_kernels
from engine.pointwise import NativePointwise, Pointwise, TorchPointwise


def make_backends(
    config: ModelConfig, settings: EngineSettings, kv: KvCache, max_context: int
) -> tuple[Attention, Pointwise]:
    """What `settings.attention` asks for; `auto` takes the native kernels wherever they build and fit.

    Raises InvalidArgument where `native` is asked for and not possible.
    """
    rotary = rotary_tables(config, max_context)
    obstacle = _native_obstacle(config, kv)
    if settings.attention == "native" and obstacle is not None:
        raise InvalidArgument("engine.attention", f"native kernels are not possible here: {obstacle}")
    if settings.attention == "torch" or obstacle is not None:
        return TorchAttention(config, kv, rotary), TorchPointwise(config.norm_epsilon)
    kernels = load_kernels()
    return (
        NativeAttention(kernels, config, kv, rotary, settings.num_threads),
        NativePointwise(kernels, kv.layout.dtype, config.norm_epsilon),
    )


def _native_obstacle(config: ModelConfig, kv: KvCache) -> str | None:
    if kv.keys.device.type != "cpu":
        return f"the device is {kv.keys.device}"
    if config.head_dim not in HEAD_DIMS or config.hidden_dim % 16 or config.intermediate_dim % 16:
        return (
            f"head_dim {config.head_dim}, hidden {config.hidden_dim}, intermediate {config.intermediate_dim}"
        )
    try:
        load_kernels()
    except NativeUnavailable as error:
        return str(error)
    return None
