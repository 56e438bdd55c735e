"""A chain in the making: what drafters that draw token by token keep of one choice while they propose."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.draft import NO_DRAFT, Draft
from decode.drafters.draws import draw_at
from decode.drafters.protocol import DraftRequest
from decode.sampling.draft_noise import DraftDraw, DrawnToken


@dataclass(slots=True, eq=False)
class GrowingChain:
    """`index`: the place of its budget. `depth`: tokens that are wanted. `token_ids` grow by one a forward.
    `broken`: it met numbers that are none."""

    index: int
    request: DraftRequest
    depth: int
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    broken: bool = False

    def next_draw(self) -> DraftDraw:
        """The draw of the next token, through the request's own pipeline."""
        return draw_at(self.request, tuple(self.token_ids))

    def take(self, drawn: DrawnToken) -> bool:
        """Append a token; whether another one is wanted."""
        self.token_ids.append(drawn.token_id)
        if drawn.draft_probs is not None:
            self.probs.append(drawn.draft_probs)
        return len(self.token_ids) < self.depth

    def draft(self) -> Draft:
        """What there is of it."""
        if not self.token_ids:
            return NO_DRAFT
        return Draft(
            token_ids=tuple(self.token_ids),
            parents=tuple(range(len(self.token_ids))),
            draft_probs=torch.stack(self.probs) if self.probs else None,
        )
