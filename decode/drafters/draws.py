"""A request's draws, as every drafter that samples makes them."""

from decode.drafters.protocol import DraftRequest
from decode.sampling.draft_noise import DraftDraw


def draw_at(request: DraftRequest, path: tuple[int, ...]) -> DraftDraw:
    """The draw behind the draft tokens `path`, through the request's own pipeline and in its lane."""
    return DraftDraw(
        sampling=request.sampling,
        seed=request.seed,
        choice=request.choice,
        position=len(request.history.token_ids) + len(path),
        verification=request.verification,
        history=request.history,
        path=path,
        lane=request.draft_lane,
    )
