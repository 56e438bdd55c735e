"""`outrider generate`: one prompt, one answer."""

import json
import sys
from typing import Annotated, Any, cast

import typer

from cluster.cli import options as o
from outrider import Client, GenerateOptions, OutriderError


def generate_command(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    address: o.Address = o.DEFAULT_ADDRESS,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Through the chat template, or as it is.")
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    max_tokens: o.MaxTokens = None,
    min_tokens: o.MinTokens = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    n: Annotated[int | None, typer.Option("-n", help="Answers.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of so many tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end of sequence.")] = False,
    beam_width: o.BeamWidth = None,
    length_penalty: o.LengthPenalty = None,
    early_stopping: o.EarlyStopping = None,
    json_schema: o.JsonSchema = None,
    regex: o.Regex = None,
    ebnf: o.Ebnf = None,
    drafter: o.Drafter = None,
    draft_length: o.DraftLength = None,
    draft_width: o.DraftWidth = None,
    verification: o.Verification = None,
    allow_approximate: o.AllowApproximate = False,
    request_class: o.RequestClass = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Same key, same answer.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Separates the prefix cache further.")] = None,
    tenant: o.Tenant = None,
    timeout_s: o.TimeoutS = None,
    as_json: o.Json = False,
) -> None:
    """Answer one prompt, streamed; a line on standard error says what the drafter did."""
    given: dict[str, Any] = {  # Any: the client checks every value
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty, "seed": seed,
        "stop": stop, "n": n, "logprobs": logprobs, "ignore_eos": ignore_eos or None, "drafter": drafter,
        "draft_length": draft_length, "draft_width": draft_width, "verification": verification,
        "allow_approximate": allow_approximate or None, "beam_width": beam_width, "regex": regex,
        "length_penalty": length_penalty, "early_stopping": o.early_stopping_of(early_stopping),
        "json_schema": o.text_of(json_schema, "--json-schema"), "ebnf": o.text_of(ebnf, "--ebnf"),
        "request_class": request_class, "idempotency_key": idempotency_key, "cache_salt": cache_salt,
    }  # fmt: skip
    text = sys.stdin.read() if prompt == "-" else prompt
    if chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        given["messages"] = [*turns, {"role": "user", "content": text}]
    try:
        with o.connect(address, tenant, timeout_s) as client:
            _answer(client, None if chat else text, cast(GenerateOptions, given), as_json)
    except OutriderError as error:
        o.fail(error)


def _answer(client: Client, prompt: str | None, options: GenerateOptions, as_json: bool) -> None:
    several = (options.get("n") or 1) > 1
    with client.stream(prompt, **options) as stream:
        for delta in stream:
            if not as_json and not several:
                print(delta.text, end="", flush=True)
        result = stream.result
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    if several:
        for choice in result.choices:
            print(f"[{choice.index}] {choice.text}")
    else:
        print()
    o.errors.print(f"[dim]{o.summary(result)} · trace {result.trace_id}[/dim]", soft_wrap=True)
