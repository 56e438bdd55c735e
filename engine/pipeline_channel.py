"""Channels between pipeline stages: `torch.distributed` between two processes, and queues within one."""

import queue
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor

from engine.pipeline_messages import PipelineBroken

NEVER: Final = timedelta(days=3650)
_LAST_WORDS: Final = timedelta(seconds=1)
_KEPT_MESSAGES: Final = 2
"""Messages whose tensors are kept without a look at them: an earlier one has been answered, so it is through."""


class DistributedChannel:
    """Point to point over a process group of two: gloo on CPUs, NCCL on GPUs (not run yet). One thread at a time."""

    def __init__(
        self,
        init_method: str,
        rank: int,
        backend: str = "gloo",
        *,
        connect_timeout_s: float = 60.0,
        silence_timeout_s: float | None = 60.0,
    ) -> None:
        """Waits for the other rank. `init_method`: `file://PATH` or `tcp://HOST:PORT`. Raises PipelineBroken.

        `silence_timeout_s`: longest wait for a tensor; None: as long as the connection holds.
        """
        self._peer = 1 - rank
        self._silence = NEVER if silence_timeout_s is None else timedelta(seconds=silence_timeout_s)
        self._sending: deque[list[tuple[Any, Tensor]]] = deque()  # Any: torch does not name its handles
        self._closed = False
        connecting = timedelta(seconds=connect_timeout_s)
        try:
            dist.init_process_group(backend, init_method, rank=rank, world_size=2, timeout=connecting)
        except (RuntimeError, ValueError) as error:
            raise PipelineBroken(f"the other stage did not come: {error}") from error

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `Channel`. Keeps the tensors until they are through."""
        try:
            self._sending.append([(dist.isend(tensor, self._peer), tensor) for tensor in tensors])
            while len(self._sending) > _KEPT_MESSAGES:
                for work, _ in self._sending.popleft():
                    work.wait(self._silence)
        except RuntimeError as error:
            raise PipelineBroken(f"the other stage is gone: {error}") from error

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        try:
            work = dist.irecv(tensor, self._peer)
            assert work is not None, "a process group of two has the other rank"
            work.wait(self._silence)
        except RuntimeError as error:
            raise PipelineBroken(f"the other stage is gone or silent: {error}") from error
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):
            for message in self._sending:
                for work, _ in message:
                    work.wait(_LAST_WORDS)
        self._sending.clear()
        dist.destroy_process_group()


class QueueChannel:
    """Both ends in one process, each on a thread of its own. For tests."""

    def __init__(
        self, outgoing: "queue.Queue[Tensor | None]", incoming: "queue.Queue[Tensor | None]", timeout_s: float
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._timeout_s = timeout_s

    @classmethod
    def pair(cls, timeout_s: float = 10.0) -> tuple[Self, Self]:
        """Two ends."""
        one: queue.Queue[Tensor | None] = queue.Queue()
        other: queue.Queue[Tensor | None] = queue.Queue()
        return cls(one, other, timeout_s), cls(other, one, timeout_s)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `Channel`."""
        for tensor in tensors:
            self._outgoing.put(tensor.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        try:
            tensor = self._incoming.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PipelineBroken("the other stage is silent") from None
        if tensor is None:
            raise PipelineBroken("the other stage is gone")
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise PipelineBroken(f"{tuple(tensor.shape)} {tensor.dtype} came, not {tuple(shape)} {dtype}")
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        self._outgoing.put(None)
