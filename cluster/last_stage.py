"""A pipelined target of a decode worker: its first stage here, its last stage in a child process.

Either one's end is the other's: the child ends with this process, and a worker without the child is beyond help.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Final, TypeVar

from cluster.engines import on_passing_thread
from cluster.stage_process import StageTask
from core.clock import SystemClock
from core.environment import child_environment, loopback_collectives, set_variables
from core.errors import Unavailable
from core.settings import EngineSettings
from engine.pipeline import PipelinedEngine, load_first_stage
from engine.pipeline_channel import DistributedChannel
from engine.weights import open_model

Result = TypeVar("Result")
_END_TIMEOUT_S: Final = 1.0


class LastStage:
    """The child process. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, task: StageTask) -> "LastStage":
        """The kernel ends the child with the *thread* that calls this: an event loop's that lives with the worker."""
        command = (sys.executable, "-m", "cluster.stage_process", task.model_dump_json())
        environment = child_environment(loopback_collectives())
        return cls(
            await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, env=environment)
        )

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as the event loop has heard."""
        return self._process.returncode is None

    async def unless_it_ends(self, work: Coroutine[None, None, Result]) -> Result:
        """What `work` returns or raises. Raises Unavailable where the child ends before that."""
        working = asyncio.create_task(work)
        ending = asyncio.create_task(self._process.wait())
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not working.done():
            working.cancel()
            raise Unavailable(
                f"the last stage's process ended with {self._process.returncode}; its log says why"
            )
        return working.result()

    async def close(self) -> None:
        """After the engine's good-bye: waits a moment, then kills. Idempotent."""
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def load_pipeline(
    model: Path,
    settings: EngineSettings,
    epoch: str,
    *,
    start_timeout_s: float,
    silence_timeout_s: float,
) -> tuple[PipelinedEngine, LastStage]:
    """Both stages, loaded side by side; a first step has gone through them. `epoch`: of the worker's life, in hex.

    `silence_timeout_s`: how long an answer may take. Raises Unavailable or PipelineBroken where the child does not
    come up; then it is gone.
    """
    set_variables(loopback_collectives())
    with tempfile.TemporaryDirectory(prefix="outrider-stage-") as directory:
        task = StageTask(
            model=model,
            engine=settings,
            init_method=f"file://{directory}/store",
            connect_timeout_s=start_timeout_s,
            parent_id=os.getpid(),
        )
        last = await LastStage.start(task)

        def load() -> PipelinedEngine:
            stage = load_first_stage(model, settings)
            channel = DistributedChannel(
                task.init_method, 0, connect_timeout_s=start_timeout_s, silence_timeout_s=silence_timeout_s
            )
            engine = PipelinedEngine(
                stage, settings, open_model(model).revision(), model, channel, _life(epoch), SystemClock()
            )
            engine.warm_up()
            return engine

        try:
            return await last.unless_it_ends(on_passing_thread(load)), last
        except BaseException:  # boundary: cleaned up, then raised again
            await last.close()
            raise


def _life(epoch: str) -> int:
    """The leading 60 bits of an epoch in hex: what fits in a header's word."""
    return int(epoch[:15], 16)
