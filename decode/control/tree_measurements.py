"""What a tree plan is made from, as a JSON file.

    {
      "rank_rates": [0.72, 0.31, 0.2],
      "step_seconds": {"1": 0.0241, "8": 0.0268, "64": 0.0913},
      "draft_level_seconds": 0.0042
    }

`rank_rates`: the probability that the k-th child of a node is the target's token, given that its earlier siblings
were not; or a list of such lists, one a depth, the last of which holds for all deeper ones. `step_seconds`: of one
target step by its rows; between them it is interpolated. `draft_level_seconds`: of one level of the draft.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from core.errors import InvalidArgument
from decode.control.step_time import StepTimeTable
from decode.control.tree_plan import TreeCosts

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Rates = Annotated[tuple[Rate, ...], Field(min_length=1)]


class TreeMeasurements(BaseModel):
    """See the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank_rates: Annotated[tuple[Rates, ...], Field(min_length=1)]
    step_seconds: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0.0)]] = {}
    draft_level_seconds: float = Field(0.0, ge=0.0)

    @field_validator("rank_rates", mode="before")
    @classmethod
    def _one_row_for_all_depths(cls, value: object) -> object:
        if isinstance(value, list | tuple) and value and not isinstance(value[0], list | tuple):
            return (value,)
        return value

    def costs(self, max_rows: int, batch: int = 1) -> TreeCosts:
        """Of steps with up to `max_rows` rows."""
        last = max(max_rows, *self.step_seconds, 1)
        table = StepTimeTable(last, self.step_seconds)
        return TreeCosts(
            step_seconds=lambda rows: table.seconds[min(rows, last)],
            draft_seconds=lambda depth: depth * self.draft_level_seconds,
            batch=batch,
        )


def read_measurements(path: Path, field: str) -> TreeMeasurements:
    """Raises InvalidArgument naming `field` and what is wrong with the file."""
    try:
        return TreeMeasurements.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(field, f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(field, f"{path}: {place}: {first['msg']}") from error
