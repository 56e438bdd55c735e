"""Loading the engine of a worker and describing it to the registry; shared by prefill and decode."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from cluster.roles import Surroundings, model_directory
from cluster.specs import WorkerSpec
from core.drafter_settings import DraftersSettings
from core.metrics import LoadGauges
from core.records import WorkerRecord
from core.settings import EngineSettings
from decode.drafters.registry import required_hidden_layers
from decode.drafters.shipped_heads import with_shipped
from engine.engine import Engine
from engine.weights import open_model

Result = TypeVar("Result")
_NO_DRAFTERS: Final[tuple[str, ...]] = ()


async def on_passing_thread(call: Callable[[], Result]) -> Result:
    """Run `call` on a thread that ends with it.

    Whatever thread enters an OpenMP region owns a pool of threads from then on. Two living pools are more threads
    than cores, and then OpenMP gives up spinning: every step of the engine's thread would cost a third more.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="passing")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)


def load_engine(spec: WorkerSpec) -> Engine:
    """The target of this deployment, loaded. Blocks for seconds; raises InvalidArgument, Unavailable."""
    return Engine.load(model_directory(spec), engine_settings(spec))


def engine_settings(spec: WorkerSpec) -> EngineSettings:
    """The engine's settings; every worker keeps the hidden planes that any drafter of the deployment needs."""
    engine = spec.settings.engine
    needed = required_hidden_layers(hosted_drafters(spec))
    return engine.model_copy(update={"hidden_layers": tuple(sorted({*engine.hidden_layers, *needed}))})


def hosted_drafters(spec: WorkerSpec) -> DraftersSettings:
    """The drafters of this deployment's decode workers, heads that ship for its target among them.

    A pipelined target has no exits, so an exit that ships is left out.
    """
    settings = spec.settings
    directory = model_directory(spec)
    revision = open_model(directory).revision()
    drafters = with_shipped(settings.decode_worker.drafters, revision, model=directory)
    if settings.engine.pipeline_stages > 1:
        return drafters.model_copy(update={"layerskip": None})
    return drafters


def worker_record(
    spec: WorkerSpec,
    around: Surroundings,
    engine: Engine,
    load: LoadGauges,
    *,
    ready: bool,
    draining: bool,
    drafters: tuple[str, ...] = _NO_DRAFTERS,
    max_draft_length: int = 0,
) -> WorkerRecord:
    """What the registry is told of a worker that has an engine."""
    return WorkerRecord(
        worker_id=spec.worker_id,
        role=spec.role,
        address=around.identity.address,
        epoch=around.identity.epoch,
        model=spec.settings.model,
        model_revision=engine.numerics.model_revision,
        numerics_class=engine.numerics.digest(),
        ready=ready,
        draining=draining,
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks or 0,
        total_blocks=engine.kv.stats().total,
        block_size=engine.kv.layout.block_size,
        max_context=engine.max_context,
        drafters=drafters,
        max_draft_length=max_draft_length,
        process_id=os.getpid(),
        metrics_address=around.metrics.address,
        hidden_layers=engine.kv.layout.hidden_layers,
    )
