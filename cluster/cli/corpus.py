"""`outrider corpus build | add | show`: texts for the drafter `rest`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli import options as o
from core.environment import cache_directory
from core.errors import InvalidArgument, ServiceError
from core.model_store import resolve_model

corpus_app = typer.Typer(no_args_is_help=True, help="Build and extend corpora for the drafter rest.")

Folder = Annotated[Path, typer.Argument(help="Folder of UTF-8 text files, searched through.", exists=True)]
Model = Annotated[str, typer.Option(help="Whose tokenizer: the target's alias, directory or hub id.")]
Glob = Annotated[list[str] | None, typer.Option(help="Which files, such as *.py; repeatable. Absent: all.")]


@corpus_app.command("build")
def build_command(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Folder to make the corpus in; must not hold one.")],
    model: Model = "smollm2-135m-instruct",
    glob: Glob = None,
    as_json: o.Json = False,
) -> None:
    """Make a corpus of a folder's files."""
    try:
        if out.exists() and any(out.iterdir()):
            raise InvalidArgument("out", f"{out} is not empty; `outrider corpus add` extends a corpus")
        _write(folder, out, model, glob, as_json)
    except ServiceError as error:
        o.fail(error)


@corpus_app.command("add")
def add_command(
    folder: Folder,
    to: Annotated[Path, typer.Option(help="The corpus.")],
    model: Model = "smollm2-135m-instruct",
    glob: Glob = None,
    as_json: o.Json = False,
) -> None:
    """Add a folder's files to a corpus; decode workers see them soon after their next request."""
    from decode.drafters.corpus import read_manifest

    try:
        read_manifest(to)
        _write(folder, to, model, glob, as_json)
    except ServiceError as error:
        o.fail(error)


@corpus_app.command("show")
def show_command(
    corpus: Annotated[Path, typer.Argument(help="The corpus.")], as_json: o.Json = False
) -> None:
    """What a corpus holds."""
    from decode.drafters.corpus import read_manifest

    try:
        manifest = read_manifest(corpus)
    except ServiceError as error:
        o.fail(error)
    if as_json:
        print(json.dumps(asdict(manifest)))
        return
    documents = sum(segment.num_documents for segment in manifest.segments)
    print(f"{manifest.num_tokens:,} tokens, {documents:,} documents, {len(manifest.segments)} segments")


def _write(folder: Path, corpus: Path, model: str, glob: list[str] | None, as_json: bool) -> None:
    from core.tokenizer import Tokenizer
    from decode.drafters.corpus import CorpusWriter, documents_of
    from decode.drafters.vocabulary import vocabulary_digest

    tokenizer = Tokenizer.from_directory(resolve_model(model, cache_directory(), _say))
    forms = glob or ["*"]
    paths = sorted({path for form in forms for path in folder.rglob(form) if path.is_file()})
    if not paths:
        raise InvalidArgument("folder", f"{folder} holds no file that is named like {' or '.join(forms)}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    read = 0
    with (
        Progress(*columns, console=o.errors, transient=True) as progress,
        CorpusWriter(corpus, vocabulary_digest(tokenizer), tokenizer.vocab_size, _say) as writer,
    ):
        task = progress.add_task("reading", total=len(paths))
        for text in documents_of(progress.track(paths, task_id=task)):
            writer.add(tokenizer.encode(text))
            read += 1
        manifest = writer.close()
    report = {
        "files": len(paths),
        "read": read,
        "tokens": manifest.num_tokens,
        "segments": len(manifest.segments),
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{read} of {len(paths)} files read; {corpus} now holds {manifest.num_tokens:,} tokens")


def _say(line: str) -> None:
    o.errors.print(f"[dim]·[/dim] {line}", soft_wrap=True)
