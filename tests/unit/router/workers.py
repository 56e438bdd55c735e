"""Worker records and views for placement tests."""

from core.records import WorkerRecord, WorkerRole
from router.views import WorkerView


def record(
    worker_id: str = "decode-0",
    role: WorkerRole = "decode",
    *,
    epoch: str | None = None,
    numerics_class: str = "class-a",
    ready: bool = True,
    draining: bool = False,
    running: int = 0,
    total_blocks: int = 64,
    drafters: tuple[str, ...] = ("none", "ngram"),
    hidden_layers: tuple[int, ...] = (),
    reported_unix_ms: int = 1,
) -> WorkerRecord:
    """A record with plausible values."""
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address="127.0.0.1:1",
        epoch=epoch if epoch is not None else f"epoch-of-{worker_id}",
        model="tiny",
        model_revision="r1",
        numerics_class=numerics_class,
        ready=ready,
        draining=draining,
        running=running,
        waiting=0,
        free_blocks=total_blocks,
        total_blocks=total_blocks,
        block_size=16,
        max_context=1024,
        drafters=drafters,
        max_draft_length=16,
        hidden_layers=hidden_layers,
        reported_unix_ms=reported_unix_ms,
    )


def view(worker_id: str, load: int = 0, overlap_tokens: int = 0, seen_s: float = 1e9) -> WorkerView:
    """A healthy worker with so many of this router's requests on it."""
    return WorkerView(record(worker_id), in_flight=load, overlap_tokens=overlap_tokens, seen_s=seen_s)
