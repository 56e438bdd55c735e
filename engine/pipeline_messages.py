"""What passes between the two stages of a pipelined target: plain tensors behind a header of whole numbers.

Every message is a header (int64, `HEADER_WORDS`), then its payload tensors, whose sizes the header says. Each one names
its step and the epoch of the worker's life, so that an answer to something else is noticed. Nothing is pickled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.step_rows import IntArray, StepRows

HEADER_WORDS: Final = 16
_ALL_ROWS: Final = -1


class Op(IntEnum):
    """What a message asks of the last stage."""

    STEP = 1
    CLOSE = 2


class PipelineBroken(RuntimeError):
    """The other stage is gone, or answered something else than it was asked."""


class Channel(Protocol):
    """An ordered way for tensors between two stages; each side knows the shapes that come."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hands the tensors on, which may not be changed until they are through. Does not wait for the reader."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor. Raises PipelineBroken where the other side is gone or silent."""
        ...

    def close(self) -> None:
        """Lets go of the connection. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One step for the last stage.

    residual: Tensor  # [rows, hidden_dim]; copies: Tensor  # [2, n] int32, slots to copy (from, to) before it
    verify: Tensor  # [bytes] uint8: what the last stage is to draw, for whoever packed it; empty: it sends logits back
    """

    number: int
    epoch: int
    rows: StepRows
    residual: Tensor
    copies: Tensor
    verify: Tensor


@dataclass(frozen=True, slots=True)
class StepReply:
    """The last stage's answer.

    logits: Tensor  # [wanted rows, vocabulary] float32; none where it verified
    verdicts: Tensor  # [words] int64: what it drew, for whoever unpacks it
    planes: Tensor  # [its hidden layers, rows, hidden_dim]
    times: Tensor  # [2] float64: seconds on the machine's clock when it began and ended
    """

    number: int
    epoch: int
    logits: Tensor
    verdicts: Tensor
    planes: Tensor
    times: Tensor


def send_step(channel: Channel, message: StepMessage) -> None:
    """Everything of a step, in the order that `receive_step` reads."""
    rows = message.rows
    wanted = () if rows.wanted_rows is None else rows.wanted_rows
    arrays: list[IntArray] = [
        rows.positions,
        rows.tail_begin,
        rows.tail_slots,
        rows.block_ids,
        np.array(rows.row_begin, dtype=np.int32),
        rows.sequence_start,
        rows.sequence_chain,
        rows.sequence_blocks,
        np.array(rows.logits_start, dtype=np.int32),
        np.array(wanted, dtype=np.int32),
        message.copies.numpy().reshape(-1),
    ]
    header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
    num_wanted = _ALL_ROWS if rows.wanted_rows is None else len(wanted)
    sizes = (rows.num_rows, len(rows.tail_slots), len(rows.block_ids), len(rows.logits_start), num_wanted)
    words = (Op.STEP, message.number, message.epoch, *sizes, message.copies.shape[1], len(message.verify))
    header[: len(words)] = torch.tensor(words, dtype=torch.int64)
    numbers = torch.from_numpy(np.concatenate(arrays, dtype=np.int32))
    tensors = [header, numbers, message.residual.contiguous()]
    channel.send([*tensors, message.verify] if len(message.verify) else tensors)


def receive_step(channel: Channel, hidden_dim: int, dtype: torch.dtype) -> StepMessage | None:
    """The next step; None: the first stage says good-bye."""
    header = channel.receive((HEADER_WORDS,), torch.int64).tolist()
    op, number, epoch, num_rows, num_tail, num_blocks, num_sequences, num_wanted, num_copies, num_bytes = (
        header[:10]
    )
    if op == Op.CLOSE:
        return None
    if op != Op.STEP:
        raise PipelineBroken(f"a message of kind {op}")
    counts = [num_rows, num_rows, num_tail, num_blocks, num_sequences + 1]
    counts += [num_sequences] * 4 + [max(0, num_wanted), 2 * num_copies]
    numbers = channel.receive((sum(counts),), torch.int32)
    parts = iter(torch.split(numbers, counts))
    positions, tail_begin, tail_slots, block_ids = (next(parts).numpy() for _ in range(4))
    row_begin = tuple(next(parts).tolist())
    starts, chains, blocks = (next(parts).numpy() for _ in range(3))
    logits_start, wanted = tuple(next(parts).tolist()), tuple(next(parts).tolist())
    copies = next(parts).view(2, num_copies)
    residual = channel.receive((num_rows, hidden_dim), dtype)
    verify = channel.receive((num_bytes,), torch.uint8) if num_bytes else torch.empty(0, dtype=torch.uint8)
    rows = StepRows(
        token_ids=np.zeros(num_rows, dtype=np.int64),
        positions=positions,
        tail_begin=tail_begin,
        tail_slots=tail_slots,
        block_ids=block_ids,
        row_begin=row_begin,
        sequence_start=starts,
        sequence_chain=chains,
        sequence_blocks=blocks,
        wanted_rows=None if num_wanted == _ALL_ROWS else wanted,
        logits_start=logits_start,
    )
    return StepMessage(number, epoch, rows, residual, copies, verify)


def send_close(channel: Channel) -> None:
    """Good-bye of the first stage."""
    header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
    header[0] = Op.CLOSE
    channel.send([header])


def send_reply(channel: Channel, reply: StepReply) -> None:
    """In the order that `receive_reply` reads."""
    header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
    words = (
        reply.number,
        reply.epoch,
        len(reply.logits),
        len(reply.verdicts),
        reply.planes.shape[0],
        reply.planes.shape[1],
    )
    header[: len(words)] = torch.tensor(words, dtype=torch.int64)
    parts = [reply.logits, reply.verdicts, reply.planes]
    channel.send([header, reply.times, *(part.contiguous() for part in parts if part.numel())])


def receive_reply(channel: Channel, vocab_size: int, hidden_dim: int, dtype: torch.dtype) -> StepReply:
    """The next answer."""
    header = channel.receive((HEADER_WORDS,), torch.int64).tolist()
    number, epoch, num_logits, num_words, num_layers, num_rows = header[:6]
    times = channel.receive((2,), torch.float64)
    logits = _receive(channel, (num_logits, vocab_size), torch.float32)
    verdicts = _receive(channel, (num_words,), torch.int64)
    planes = _receive(channel, (num_layers, num_rows, hidden_dim), dtype)
    return StepReply(number, epoch, logits, verdicts, planes, times)


def _receive(channel: Channel, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Nothing is sent of a tensor without elements."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return channel.receive(shape, dtype)
