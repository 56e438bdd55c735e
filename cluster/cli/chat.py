"""`outrider chat`: a conversation in the terminal."""

from typing import Annotated

import typer

from cluster.cli import options as o
from outrider import Client, GenerateOptions, Message, OutriderError

_HELP = "[dim]/reset starts over, /exit or an empty line with Ctrl-D leaves, Ctrl-C ends an answer[/dim]"


def chat_command(
    address: o.Address = o.DEFAULT_ADDRESS,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    seed: o.Seed = None,
    drafter: o.Drafter = None,
    draft_length: o.DraftLength = None,
    tenant: o.Tenant = None,
) -> None:
    """Talk; after each answer a line says what the drafter did."""
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        drafter=drafter,
        draft_length=draft_length,
    )
    start: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    o.errors.print(_HELP)
    with o.connect(address, tenant) as client:
        try:
            client.drafters()
        except OutriderError as error:
            o.fail(error)
        _converse(client, options, start)


def _converse(client: Client, options: GenerateOptions, start: list[Message]) -> None:
    messages = list(start)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = _answer(client, options, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(client: Client, options: GenerateOptions, messages: list[Message]) -> str | None:
    """The answer's text; None after an error or an interruption, so that the turn can be asked again."""
    turn = options.copy()
    turn["messages"] = messages
    stream = client.stream(**turn)
    try:
        for delta in stream:
            print(delta.text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        o.errors.print("\n[dim]stopped[/dim]")
        return None
    except OutriderError as error:
        o.errors.print(f"\n[bold red]{error.status}[/bold red]", end=" ")
        o.errors.print(error.message, markup=False)
        return None
    finally:
        stream.close()
    o.errors.print(f"[dim]{o.summary(stream.result)}[/dim]", soft_wrap=True)
    return stream.result.text
