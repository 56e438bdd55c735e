"""Invariant verification: the text is what plain decoding gives, whatever was proposed.

The token of answer `choice` at absolute position n is argmax_v(log t(v) + gumbel(seed, choice, n, v)), ties to
the lowest id; at temperature 0 argmax_v of the logits. Walk the tree: draw the target's token at a node; if a
child holds it, go there, else emit it and stop. A drafter that samples adds the same noise to log d; then
P(match) ≥ (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024, "Coupling without communication").
"""

from decode.draft import VerifyItem
from decode.sampling.noise import Stream
from decode.sampling.step_items import DrawItem


def invariant_draw(item: VerifyItem) -> DrawItem:
    """The walk that verifies `item`."""
    return DrawItem(
        sampling=item.sampling,
        seed=item.seed,
        choice=item.choice,
        position=item.position,
        history=item.history,
        logits_row=item.logits_start,
        stream=Stream.SHARED,
        token_ids=item.draft.token_ids,
        parents=item.draft.parents,
    )
