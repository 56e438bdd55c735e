"""How the demo looks on a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from cluster.trace_collector import CollectedSpan, SpanNode, span_tree
from core import telemetry_names as names
from outrider import Speculation

SHOWN_ATTRIBUTES = (
    names.REQUEST_CLASS,
    names.DRAFTER_NAME,
    names.ROUTE_REASON,
    names.STEPS,
    names.ACCEPTED_TOKENS,
    names.ACCEPTANCE_RATE,
    names.ACCEPTANCE_LENGTH,
    names.POSITION_OFFERED,
    names.POSITION_ACCEPTED,
    names.HANDOFF_OUTCOME,
    names.HANDOFF_BLOCKS,
    names.HANDOFF_SIZE,
    names.CACHED_TOKENS,
    names.GEN_AI_INPUT_TOKENS,
    names.GEN_AI_OUTPUT_TOKENS,
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One answered request, as the table shows it. `identical`: to the text of `none`."""

    title: str
    asked_drafter: str
    speculation: Speculation
    tokens_per_s: float
    ratio: float
    identical: bool


def print_results(console: Console, results: Sequence[Shown]) -> None:
    """One line a request: accepted of offered tokens, tokens emitted a step, speed after the first token."""
    table = Table(
        title="Every prompt with every drafter", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1)
    )
    for heading in ("prompt", "drafter"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accepted", "rate", "a step", "tok/s", "× none"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    for result in results:
        verdict = "[green]same[/green]" if result.identical else "[bold red]DIFFERS[/bold red]"
        table.add_row(*_cells(result), verdict, end_section=result.asked_drafter == "auto")
    console.print(table)


def _cells(result: Shown) -> tuple[str, ...]:
    report = result.speculation
    drafter = result.asked_drafter
    if drafter == "auto":
        drafter = f"auto: {report.drafter}"
    offered = sum(report.position_offered)
    return (
        escape(result.title),
        escape(drafter),
        f"{report.accepted_tokens}/{offered}" if offered else "–",
        _number(report.acceptance_rate, "{:.0%}"),
        _number(report.acceptance_length, "{:.2f}"),
        f"{result.tokens_per_s:.0f}",
        f"{result.ratio:.2f}",
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def print_trace(console: Console, spans: Sequence[CollectedSpan]) -> None:
    """A trace as a tree, with the process that each span comes from."""
    if not spans:
        console.print("[red]no span of this trace arrived[/red]")
        return
    origin_ns = min(span.start_unix_ns for span in spans)
    for root in span_tree(spans):
        tree = Tree(_label(root, origin_ns), guide_style="dim")
        _grow(tree, root, origin_ns)
        console.print(tree)


def _grow(tree: Tree, node: SpanNode, origin_ns: int) -> None:
    for child in node.children:
        _grow(tree.add(_label(child, origin_ns)), child, origin_ns)


def _label(node: SpanNode, origin_ns: int) -> str:
    span = node.span
    start_ms = (span.start_unix_ns - origin_ns) / 1e6
    failed = " [red]failed[/red]" if span.failed else ""
    head = (
        f"[bold]{escape(span.name)}[/bold] [cyan]{escape(span.instance or span.service)}[/cyan] "
        f"+{start_ms:.0f} ms, {span.duration_s * 1e3:.0f} ms{failed}"
    )
    facts = [
        f"{_short(key)}={_plain(span.attributes[key])}" for key in SHOWN_ATTRIBUTES if key in span.attributes
    ]
    return head + (f"\n[dim]{escape(', '.join(facts))}[/dim]" if facts else "")


def _short(key: str) -> str:
    return key.removeprefix("outrider.").removeprefix("gen_ai.")


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + " ".join(map(_plain, value)) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
