"""The demo: a real model answers through the whole system, with every drafter, and the texts are compared.

It starts `outrider serve` with one prefill and one decode worker, asks four prompts with `none`, `ngram`, the heads
that ship (`eagle3`, `medusa`), `draft_model` and `auto`, and prints acceptance, speed and one trace. Its exit code is 1
where any text is not the one of `none`, or the trace is incomplete.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from cluster.demo.script import DRAFTERS, MAX_TOKENS, PROMPTS, DemoPrompt
from cluster.demo.show import Shown, print_results, print_trace
from cluster.local import LocalCluster
from cluster.trace_collector import CollectedSpan, TraceCollector
from core import telemetry_names as names
from core.clock import Clock, SystemClock
from core.environment import cache_directory
from core.errors import ServiceError
from core.model_store import resolve_model
from core.settings import TelemetrySettings
from core.telemetry import setup_telemetry
from engine.truncate import truncate_model
from outrider import Client, OutriderError, Result

MODEL = "smollm2-135m-instruct"
DRAFT_LAYERS = 24
TRACE_TIMEOUT_S = 15.0
WANTED_SPANS = frozenset({names.SPAN_CLIENT, names.SPAN_ROUTER, names.SPAN_DECODE, names.SPAN_PREFILL})


class Demo:
    """One run against a running deployment."""

    def __init__(self, client: Client, console: Console, clock: Clock) -> None:
        self._client = client
        self._console = console
        self._clock = clock

    def ask(self, prompt: DemoPrompt, drafter: str, *, visible: bool) -> tuple[Result, float]:
        """The answer and its speed in tokens a second after the first; `visible`: shown while it is written.

        Each drafter has a cache salt of its own, so that every request is handed off from the prefill worker.
        """
        stream = self._client.stream(
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=MAX_TOKENS,
            temperature=prompt.temperature,
            seed=prompt.seed,
            drafter=drafter,
            draft_length=DRAFTERS[drafter],
            cache_salt=drafter,
        )
        first_s: float | None = None
        first_tokens = 0
        for delta in stream:
            if first_s is None:
                first_s, first_tokens = self._clock.now_s(), len(delta.token_ids)
            if visible:
                self._console.print(Text(delta.text, style="italic"), end="")
        end_s = self._clock.now_s()
        rest = len(stream.result.token_ids) - first_tokens
        seconds = end_s - (first_s if first_s is not None else end_s)
        return stream.result, rest / seconds if seconds > 0 else 0.0

    def ask_with_every_drafter(self, prompt: DemoPrompt) -> tuple[list[Shown], list[Result]]:
        """One prompt with each; the first answer, plain decoding's, is what the others are compared with."""
        how = f"temperature {prompt.temperature:g}" if prompt.temperature else "greedy"
        self._console.rule(f"[bold]{prompt.title}[/bold] ({how})", align="left", style="dim")
        self._console.print(Text(prompt.text, style="dim"))
        shown: list[Shown] = []
        results: list[Result] = []
        for drafter in DRAFTERS:
            result, rate = self.ask(prompt, drafter, visible=not results)
            results.append(result)
            plain, plain_rate = (results[0], shown[0].tokens_per_s) if shown else (result, rate)
            same = (result.token_ids, result.text) == (plain.token_ids, plain.text)
            ratio = rate / plain_rate if plain_rate else 0.0
            shown.append(Shown(prompt.title, drafter, result.speculation, rate, ratio, same))
        self._console.print("\n")
        return shown, results


def run(console: Console, collector: TraceCollector, work: Path, clock: Clock) -> int:
    """Starts the deployment, asks, shows; the exit code."""
    directory = resolve_model(MODEL, cache_directory(), lambda line: console.print(line, style="dim"))
    draft = truncate_model(directory, DRAFT_LAYERS, work / "draft")
    settings = {
        "telemetry.otlp_endpoint": collector.endpoint,
        "decode_worker.drafters.draft_model.model": str(draft),
    }
    telemetry = setup_telemetry(TelemetrySettings(otlp_endpoint=collector.endpoint), "client", "demo")
    with console.status("starting outrider serve: Ray, redis, router, one prefill and one decode worker"):
        cluster = LocalCluster(model=MODEL, settings=settings, log_path=work / "serve.log").start()
    try:
        console.print(f"serving {MODEL} on {cluster.address}", style="green", highlight=False)
        with Client(cluster.address, timeout_s=120.0) as client:
            demo = Demo(client, console, clock)
            asked = [demo.ask_with_every_drafter(prompt) for prompt in PROMPTS]
        trace_id = asked[0][1][list(DRAFTERS).index("ngram")].trace_id
        spans = collector.wait(trace_id, _complete, TRACE_TIMEOUT_S)
    finally:
        with console.status("draining and stopping"):
            cluster.stop()
        telemetry.shutdown()
    shown = [line for lines, _ in asked for line in lines]
    print_results(console, shown)
    _explain(console)
    console.print(Panel(f"One trace across the processes (prompt 1, ngram): {trace_id}", expand=False))
    print_trace(console, spans)
    return _verdict(console, shown, spans)


def _complete(spans: Sequence[CollectedSpan]) -> bool:
    return {span.name for span in spans} >= WANTED_SPANS


def _explain(console: Console) -> None:
    console.print(
        f"`draft_model` is the target itself cut to {DRAFT_LAYERS} of its 30 layers. Untrained for drafting, it "
        "agrees with the target about a third of the time and costs most of a step for each token drafted, so it "
        "is slower than plain decoding. It is here to show that a bad drafter costs time and never a token.",
        style="dim",
        highlight=False,
    )


def _verdict(console: Console, shown: Sequence[Shown], spans: Sequence[CollectedSpan]) -> int:
    differing = [line for line in shown if not line.identical]
    missing = WANTED_SPANS - {span.name for span in spans}
    if missing:
        console.print(f"The trace lacks {', '.join(sorted(missing))}.", style="bold red")
    if differing:
        console.print(f"{len(differing)} of {len(shown)} texts differ from plain decoding.", style="bold red")
    if not differing and not missing:
        console.print(f"All {len(shown)} texts are those of plain decoding.", style="bold green")
    return 1 if differing or missing else 0


def main() -> int:
    """The exit code of `python -m cluster.demo`."""
    console = Console(highlight=False)
    clock = SystemClock()
    started_s = clock.now_s()
    try:
        with TraceCollector() as collector, tempfile.TemporaryDirectory(prefix="outrider-demo-") as work:
            code = run(console, collector, Path(work), clock)
    except (ServiceError, OutriderError) as error:
        console.print(f"The demo failed: {error}", style="bold red")
        return 1
    console.print(f"{clock.now_s() - started_s:.0f} s in all", style="dim")
    return code
