"""The process of a pipelined target's last stage, a child of its decode worker's (see `cluster/last_stage.py`).

Started as `python -m cluster.stage_process TASK`, TASK being JSON without secrets. It loads its layers, meets the
first stage, and answers steps until that says good-bye. It ends with its parent, however that ends.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Final

from cluster.processes import die_with_parent
from core.clock import SystemClock
from core.section import Section
from core.settings import EngineSettings
from decode.last_word import NativeLastWord
from engine.pipeline import serve_last_stage
from engine.pipeline_channel import DistributedChannel
from engine.pipeline_messages import PipelineBroken
from engine.stage import Stage, split_layers
from engine.weights import open_model

_LOG: Final = logging.getLogger(__name__)


class StageTask(Section):
    """What the child is told. `parent_id`: who started it."""

    model: Path
    engine: EngineSettings
    init_method: str
    connect_timeout_s: float
    parent_id: int


def run(task: StageTask) -> None:
    """Loads and serves. Raises PipelineBroken where the first stage does not come, or is lost."""
    num_layers = open_model(task.model).config.num_layers
    layers = split_layers(num_layers, task.engine.pipeline_stages)[-1]
    stage = Stage.load(task.model, task.engine, layers)
    channel = DistributedChannel(
        task.init_method, 1, connect_timeout_s=task.connect_timeout_s, silence_timeout_s=None
    )
    try:
        serve_last_stage(stage, channel, NativeLastWord(), SystemClock())
    finally:
        channel.close()


def main() -> None:
    """See the module."""
    task = StageTask.model_validate_json(sys.argv[1])
    die_with_parent()
    if os.getppid() != task.parent_id:
        sys.exit("the decode worker ended while this process started")
    try:
        run(task)
    except PipelineBroken:
        _LOG.exception("the last stage of a pipelined target ends")
        sys.exit(1)


if __name__ == "__main__":
    main()
