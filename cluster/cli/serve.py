"""`outrider serve` and `outrider down`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.serve import ServeReport, serve
from core.errors import InvalidArgument, ServiceError
from core.settings import load_settings


class _ConsoleReport(ServeReport):
    """Progress on stderr, the one ready line on stdout."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    def progress(self, text: str) -> None:
        """See `ServeReport`."""
        self._console.print(f"[dim]·[/dim] {text}", highlight=False, soft_wrap=True)

    def ready(self, address: str) -> None:
        """See `ServeReport`."""
        print(f"outrider ready on {address}", flush=True)

    def failed(self, text: str) -> None:
        """See `ServeReport`."""
        self._console.print("[bold red]failed:[/bold red]", end=" ")
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def serve_command(
    model: Annotated[str | None, typer.Option(help="Alias, model directory or GGUF file.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT of the front door.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Join this Ray and leave the deployment there.")
    ] = None,
    redis: Annotated[str | None, typer.Option(help="URL; absent: an embedded redis-server.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: key.path=value, repeatable.")
    ] = None,
) -> None:
    """Start pools, router, Ray and redis; serve until SIGINT or SIGTERM."""
    named = {
        "model": model,
        "prefill": prefill,
        "decode": decode,
        "listen": listen,
        "ray_address": ray_address,
        "redis_url": redis,
    }
    report = _ConsoleReport()
    try:
        overrides = {**parse_overrides(set_ or []), **{k: v for k, v in named.items() if v is not None}}
        code = serve(load_settings(config, overrides), report)
    except ServiceError as error:
        report.failed(error.message)
        code = 2
    raise typer.Exit(code)


def down_command(
    ray_address: Annotated[str, typer.Option(help="The Ray that `outrider serve --ray-address` was given.")],
    grace_s: Annotated[float, typer.Option(help="How long running requests may go on.")] = 10.0,
) -> None:
    """End a deployment that was left in a Ray cluster."""
    from cluster.pools import end_deployment, join_ray, leave_ray

    report = _ConsoleReport()
    try:
        join_ray(ray_address)
        names = end_deployment(grace_s)
        leave_ray()
    except ServiceError as error:
        report.failed(error.message)
        raise typer.Exit(1) from error
    report.progress(f"ended {', '.join(names)}" if names else "nothing to end")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:  # Any: values are checked by the settings
    """`key.path=value` pairs. A value is TOML where it parses as such, else a string; `none` is None."""
    import tomllib

    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise InvalidArgument("--set", f"{pair!r} is not key=value")
        if text.lower() in {"none", "true", "false"}:
            overrides[key] = {"none": None, "true": True, "false": False}[text.lower()]
            continue
        try:
            overrides[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            overrides[key] = text
    return overrides
