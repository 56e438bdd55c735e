"""`outrider bench`: drafters against plain decoding, prompt by prompt."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.cli import options as o
from cluster.cli.bench_run import BenchPlan, BenchRun, Outcome, Salting, parse_arms
from cluster.cli.bench_stats import BASELINE, Row, rows
from cluster.cli.prompts import load_prompts
from core.clock import SystemClock
from core.environment import bearer_token
from core.errors import InvalidArgument, ServiceError
from outrider import AsyncClient, GenerateOptions, OutriderError

_SALTINGS: dict[str, Salting] = {"arm": "arm", "shared": "shared", "request": "request"}


def bench_command(
    prompts: o.PromptsFile,
    address: o.Address = o.DEFAULT_ADDRESS,
    drafters: Annotated[
        str, typer.Option(help="Arms: NAME, NAME:K or NAME:KxWIDTH, by comma.")
    ] = "none,ngram",
    concurrency: Annotated[str, typer.Option(help="Requests at once, by comma.")] = "1",
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly max-tokens.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often all is asked.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts, every class in its turn.")] = None,
    classes: Annotated[str, typer.Option(help="Only these classes, by comma.")] = "",
    cache_salt: Annotated[
        str, typer.Option(help="Cached prefixes: arm (each its own), shared, request.")
    ] = "arm",
    timeout_s: o.TimeoutS = 300.0,
    as_json: o.Json = False,
) -> None:
    """Measure speed and acceptance of drafters against plain decoding, and compare the texts."""
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos or None,
        timeout_s=timeout_s,
    )
    try:
        if cache_salt not in _SALTINGS:
            raise InvalidArgument("cache-salt", f"{cache_salt!r} is not one of {', '.join(_SALTINGS)}")
        names = [name.strip() for name in classes.split(",") if name.strip()]
        plan = BenchPlan(
            cases=tuple(load_prompts(prompts, limit, names)),
            arms=parse_arms(drafters),
            concurrencies=_whole_numbers(concurrency),
            rounds=rounds,
            options=options,
            salting=_SALTINGS[cache_salt],
        )
        outcome = asyncio.run(_run(address, plan))
    except (ServiceError, OutriderError) as error:
        o.fail(error)
    table = rows(outcome.samples)
    _print_table(table, plan)
    _print_totals(outcome)
    failed = _print_failures(outcome, table)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in table], "totals": totals(outcome)}))
    raise typer.Exit(1 if failed else 0)


async def _run(address: str, plan: BenchPlan) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=o.errors, transient=True) as progress:
        task = progress.add_task("asking", total=plan.num_requests)
        async with AsyncClient(address, token=bearer_token()) as client:
            await _require_offered(client, plan)
            return await BenchRun(client, plan, SystemClock(), lambda: progress.advance(task)).run()


async def _require_offered(client: AsyncClient, plan: BenchPlan) -> None:
    offered = {"auto", "none", *(info.name for info in await client.drafters())}
    for arm in plan.arms:
        if arm.drafter not in offered:
            raise InvalidArgument(
                "drafters", f"{arm.drafter!r} is not offered there; these are: {', '.join(sorted(offered))}"
            )


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgument("concurrency", f"{text!r} is no list of whole numbers") from error
    if min(numbers) < 1:
        raise InvalidArgument("concurrency", "must be 1 or more")
    return numbers


def totals(outcome: Outcome) -> list[dict[str, Any]]:
    """Tokens a second of each arm over all its groups, by concurrency, and the ratio to plain decoding."""
    tokens: Counter[tuple[int, str]] = Counter()
    seconds: dict[tuple[int, str], float] = {}
    for group in outcome.group_times:
        key = (group.concurrency, group.arm)
        tokens[key] += group.tokens
        seconds[key] = seconds.get(key, 0.0) + group.seconds
    rates = {key: tokens[key] / seconds[key] if seconds[key] else 0.0 for key in seconds}
    return [
        {
            "concurrency": concurrency,
            "arm": arm,
            "tokens_per_s": rate,
            "ratio": rate / base if (base := rates.get((concurrency, BASELINE), 0.0)) else None,
        }
        for (concurrency, arm), rate in rates.items()
    ]


_HEADINGS = (
    "at once", "class", "arm", "prompts", "tok/s", "ratio", "≥ (95 %)", "accepted", "tok/step",
    "TTFT p50/p99 ms", "ITL p50/p99 ms", "same text",
)  # fmt: skip


def _print_table(table: Sequence[Row], plan: BenchPlan) -> None:
    view = Table(
        title=f"{len(plan.cases)} prompts, {plan.rounds} round(s); ratio: median over prompts to {BASELINE}"
    )
    for index, heading in enumerate(_HEADINGS):
        view.add_column(heading, justify="left" if 1 <= index <= 2 else "right")
    for row in table:
        view.add_row(*_cells(row))
    o.errors.print(view)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.concurrency),
        row.class_name,
        row.arm,
        str(row.prompts),
        _number(row.tokens_per_s, "{:.1f}"),
        _number(row.ratio, "{:.3f}"),
        _number(row.ratio_lower, "{:.3f}"),
        _number(row.acceptance_rate, "{:.1%}"),
        _number(row.acceptance_length, "{:.2f}"),
        f"{_milliseconds(row.first_token_p50_s)}/{_milliseconds(row.first_token_p99_s)}",
        f"{_milliseconds(row.token_gap_p50_s)}/{_milliseconds(row.token_gap_p99_s)}",
        "–" if row.equal_texts is None else f"{row.equal_texts}/{row.compared_texts}",
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"


def _print_totals(outcome: Outcome) -> None:
    for total in totals(outcome):
        ratio = _number(total["ratio"], "{:.3f}")
        o.errors.print(
            f"{total['concurrency']} at once, {total['arm']}: {total['tokens_per_s']:.1f} tok/s in all, ratio {ratio}"
        )


def _print_failures(outcome: Outcome, table: Sequence[Row]) -> bool:
    """Says what failed or differed. True if anything did."""
    failures = Counter(sample.error for sample in outcome.samples if sample.error is not None)
    for message, count in failures.most_common(5):
        o.errors.print(f"{count} × {message}", style="red", markup=False)
    different = sum(row.compared_texts - (row.equal_texts or 0) for row in table)
    if different:
        o.errors.print("some texts differ from plain decoding", style="red")
    return bool(failures or different)
