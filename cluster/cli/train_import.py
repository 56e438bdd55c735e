"""`outrider train import`: a public checkpoint becomes an artifact."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import options as o
from cluster.cli.train_progress import say
from core.environment import cache_directory
from core.errors import InvalidArgument
from core.model_store import resolve_model


def import_command(
    checkpoint: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder with config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the artifact.")],
    model: Annotated[str, typer.Option(help="The target that the head was trained for.")],
    layers: Annotated[
        str | None,
        typer.Option(
            help="EAGLE-3: captured layers, by comma. Absent: as the checkpoint says, or 3, spread."
        ),
    ] = None,
    layer_base: Annotated[
        int, typer.Option(min=0, max=1, help="EAGLE-3, 1: layer numbers count the embedding's output as 0.")
    ] = 0,
) -> None:
    """Take an EAGLE-3 head or Medusa heads that others trained; every tensor is accounted for."""
    from training.public_checkpoint import PublicHead, import_eagle3
    from training.public_medusa import import_medusa, is_medusa

    try:
        numbers = None if layers is None else tuple(int(part) for part in layers.split(","))
    except ValueError:
        o.fail(InvalidArgument("layers", f"{layers!r} is no list of layers"))
    with o.refusals():
        medusa = is_medusa(checkpoint)
        head = PublicHead(checkpoint, resolve_model(model, cache_directory(), say), numbers, layer_base)
        manifest = (import_medusa if medusa else import_eagle3)(head, out)
    if medusa:
        print(f"{out} holds {manifest.shape['num_heads']} Medusa heads")
    else:
        print(f"{out} holds an EAGLE-3 head on layers {', '.join(map(str, manifest.hidden_layers))}")
