"""What every group of settings has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, closed group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
