"""Channels between pipeline stages: `torch.distributed` between two processes, and queues within one."""

import queue
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from engine.pipeline_messages import PipelineBroken


class DistributedChannel:
    """Point to point over a process group of two: gloo on CPUs, NCCL on GPUs. Belongs to one thread."""

    def __init__(self, init_method: str, rank: int, backend: str = "gloo", timeout_s: float = 60.0) -> None:
        """Waits for the other rank. `init_method`: `file://PATH` or `tcp://HOST:PORT`. Raises PipelineBroken."""
        self._peer = 1 - rank
        self._sending: deque[tuple[Any, Tensor]] = deque()
        self._closed = False
        try:
            dist.init_process_group(
                backend, init_method, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise PipelineBroken(f"the other stage did not come: {error}") from error

    def send(self, tensors: Sequence[Tensor]) -> None:
        """See `Channel`. Keeps the tensors until they are through."""
        try:
            for tensor in tensors:
                self._sending.append((dist.isend(tensor, self._peer), tensor))
            while self._sending and self._sending[0][0].is_completed():
                self._sending.popleft()
        except RuntimeError as error:
            raise PipelineBroken(f"the other stage is gone: {error}") from error

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        try:
            dist.recv(tensor, self._peer)
        except RuntimeError as error:
            raise PipelineBroken(f"the other stage is gone or silent: {error}") from error
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        if not self._closed:
            self._closed = True
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
