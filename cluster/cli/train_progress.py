"""Bars, and the way in which a training command is stopped."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli import options as o


def shown_progress() -> Progress:
    """Bars on standard error that go away at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=o.errors, transient=True)


def stages_of(progress: Progress) -> Callable[[str, int], Callable[[int, str], None]]:
    """A bar for each stage of a run."""

    def stage(name: str, total: int) -> Callable[[int, str], None]:
        task = progress.add_task(name, total=total)

        def told(done: int, word: str) -> None:
            progress.update(task, advance=done, description=f"{name} {word}".strip())

        return told

    return stage


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, so that the step under way ends and what there is is kept."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    """A line on standard error."""
    o.errors.print(f"[dim]·[/dim] {escape(line)}", soft_wrap=True)
