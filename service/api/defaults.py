"""Sampling parameters that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import CheckpointError

from .schemas import MIN_REPETITION_PENALTY


class SamplingDefaults(BaseModel):
    """Used where a request leaves a parameter out. Without a recommendation: OpenAI's defaults."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=100)


def load_defaults(checkpoint: Path) -> SamplingDefaults:
    """Read the recommendations, if the checkpoint has any.

    Raises:
        CheckpointError: the file is no JSON or a value is out of range.
    """
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        return SamplingDefaults.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise CheckpointError(f"{path}: {where}: {problem['msg']}") from error
