"""The options that several commands share, and what they become."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from safetensors import SafetensorError

from core.environment import bearer_token
from core.errors import FailedPrecondition, InvalidArgument, ServiceError
from outrider import Client, InvalidArgumentError, OutriderError, Result
from outrider.calls import NO_SERVER

DEFAULT_ADDRESS = "127.0.0.1:50051"

Address = Annotated[str, typer.Option(help="HOST:PORT of the router.")]
Tenant = Annotated[str | None, typer.Option(help="Whose request it is.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer.")]
MinTokens = Annotated[int | None, typer.Option(help="No end of sequence before this many tokens.")]
Temperature = Annotated[float | None, typer.Option(help="0: greedy.")]
TopK = Annotated[int | None, typer.Option(help="Only the k likeliest tokens; 0: off.")]
TopP = Annotated[float | None, typer.Option(help="Only the likeliest tokens of this mass; 1: off.")]
MinP = Annotated[float | None, typer.Option(help="Only tokens of this share of the likeliest; 0: off.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="1: off.")]
PresencePenalty = Annotated[float | None, typer.Option(help="0: off.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="0: off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
BeamWidth = Annotated[int | None, typer.Option(help="Search for the likeliest answer with so many beams.")]
LengthPenalty = Annotated[
    float | None, typer.Option(help="Of beam search: score = Σ log-prob / length ^ this.")
]
EarlyStopping = Annotated[
    str | None, typer.Option(help="Of beam search: true, false or never; see the protocol.")
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="The answer is JSON by the schema in this file."),
]
Regex = Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")]
Ebnf = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="The answer follows the grammar in this file, from `root` on."
    ),
]
Drafter = Annotated[str | None, typer.Option(help="auto, none, or a drafter that the deployment offers.")]
DraftLength = Annotated[int | None, typer.Option(help="Depth K of the draft; absent: Outrider chooses.")]
DraftWidth = Annotated[int | None, typer.Option(help="Most children of a node; 1: a chain.")]
Verification = Annotated[
    str | None,
    typer.Option(help="invariant, rejection, block, or typical, which needs --allow-approximate."),
]
AllowApproximate = Annotated[
    bool, typer.Option("--allow-approximate", help="The answer need not follow the model's distribution.")
]
RequestClass = Annotated[str | None, typer.Option(help="Absent: the router classifies.")]
TimeoutS = Annotated[float | None, typer.Option("--timeout-s", help="Seconds that a request may take.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
PromptsFile = Annotated[
    Path, typer.Option(exists=True, dir_okay=False, help="JSON lines: turns, messages or prompt.")
]

errors = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)
"""Where everything but the answer goes."""


def early_stopping_of(text: str | None) -> bool | str | None:
    """What the client takes for the text of `--early-stopping`; an unknown one is left for it to refuse."""
    return None if text is None else {"true": True, "false": False}.get(text.lower(), text)


def connect(address: str, tenant: str | None = None, timeout_s: float | None = None) -> Client:
    """A client with the deployment's token from the environment."""
    return Client(address, token=bearer_token(), tenant=tenant, timeout_s=timeout_s)


def fail(error: OutriderError | ServiceError) -> NoReturn:
    """Says what went wrong and ends the command: 2 for bad input, else 1."""
    retry = f" (retry after {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    errors.print(f"[bold red]{error.status}[/bold red]", end=" ")
    errors.print(f"{error.message}{retry}", markup=False, soft_wrap=True)
    if error.message.startswith(NO_SERVER):
        errors.print("start one with `outrider serve`, or name its address: --address HOST:PORT")
    bad_input = isinstance(error, InvalidArgumentError) or error.status == "INVALID_ARGUMENT"
    raise typer.Exit(2 if bad_input else 1)


@contextmanager
def refusals() -> Iterator[None]:
    """Errors of ours, and files that cannot be read or written, end the command with their line."""
    try:
        yield
    except ServiceError as error:
        fail(error)
    except (OSError, SafetensorError) as error:
        fail(FailedPrecondition("files", f"{error}; what was whole before is kept"))


def text_of(file: Path | None, option: str) -> str | None:
    """What a file holds. Ends the command where that is no text."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(InvalidArgument(option, f"{file}: {error}"))


def summary(result: Result) -> str:
    """One line: how long the answer is, how fast it came, and what its drafter did."""
    speculation, timing = result.speculation, result.timing
    tokens = result.usage.completion_tokens
    rate = f", {tokens / timing.total_s:.1f} tok/s" if timing.total_s > 0 else ""
    parts = [f"{tokens} tokens{rate}, first after {timing.time_to_first_token_s * 1000:.0f} ms"]
    if speculation.acceptance_rate is None:
        parts.append(f"drafter {speculation.drafter}: nothing drafted")
    else:
        parts.append(
            f"drafter {speculation.drafter}: accepted {speculation.accepted_tokens} of "
            f"{sum(speculation.position_offered)} ({speculation.acceptance_rate:.0%}), "
            f"{speculation.acceptance_length or 0:.2f} tokens a step"
        )
    if result.approximate:
        invariant = result.verification == "invariant"
        parts.append(f"approximate: {'its drafter' if invariant else f'{result.verification} verification'}")
    if speculation.fallback_reason:
        parts.append(f"fell back: {speculation.fallback_reason}")
    parts.append(f"class {speculation.request_class}, seed {result.seed}, ended by {result.finish_reason}")
    return " · ".join(parts)
