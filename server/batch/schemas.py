"""Bodies and queries of /v1/files and /v1/batches."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from server.api.openai.schemas.fields import Between
from server.batch.form import FORM
from server.batch.lines import Endpoint
from server.http.body import Body, Part, few
from server.http.query import WHOLE, Query

HOUR, MONTH = 3600, 30 * 24 * 3600
MAX_METADATA = 16
FileOrder = Literal["asc", "desc"]
Purpose = Literal["batch", "batch_output"]


class ExpiresAfter(Part):
    """When a file is deleted. The anchor is the time at which it is created."""

    anchor: Literal["created_at"]
    """The time that the seconds count from."""
    seconds: Annotated[int, Between(HOUR, MONTH)]
    """Seconds after which the file is deleted."""


class BatchBody(Body):
    """A new batch. Its input is an uploaded file whose lines all name `endpoint`."""

    input_file_id: Annotated[str, StringConstraints(min_length=1)]
    """The id of an uploaded file with one request a line."""
    endpoint: Endpoint
    """The path that every line names."""
    completion_window: Literal["24h"]
    """OpenAI's only value."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
            BeforeValidator(partial(few, most=MAX_METADATA)),
        ]
        | None
    ) = None
    """Texts that the batch repeats."""
    output_expires_after: ExpiresAfter | None = None
    """When the files of results are deleted."""


class BatchQuery(Query):
    """A page of the list of batches: those after the batch `after`."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100), WHOLE] = 20


class FileQuery(Query):
    """A page of the list of files: those after the file `after`."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000), WHOLE] = 10_000
    order: FileOrder = "desc"
    purpose: Purpose | None = None


UPLOAD_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "title": "Upload",
                    "type": "object",
                    "required": ["file", "purpose"],
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": HOUR,
                            "maximum": MONTH,
                        },
                    },
                }
            }
        },
    }
}
