"""OpenAI's schemas, to validate answers: of its client's types, or of its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import openai.types
import yaml
from jsonschema import Draft202012Validator
from openai.types import chat, responses, shared
from pydantic import BaseModel, TypeAdapter, create_model

COMPLETION = "CreateCompletionResponse"  # also of the chunks of a text completion
STREAM_EVENTS = "ResponseStreamEvent"  # any event of a streamed response
REFERENCE = "#/components/schemas/"
NULLABLE = "nullable"  # a word of OpenAPI 3.0 that the document, of version 3.1, also uses


def with_nulls(schema: Any) -> Any:
    """Return a schema, or a part of one, in which `nullable: true` is said in JSON Schema."""
    if isinstance(schema, list):
        return [with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {name: with_nulls(value) for name, value in schema.items() if name != NULLABLE}
    if schema.get(NULLABLE) is True:
        return {"anyOf": [rest, {"type": "null"}]}
    return rest


def listing(name: str, kind: Any, **more: Any) -> type[BaseModel]:
    """Return the type of a list of objects. The client has none with all fields."""
    return create_model(name, object=Literal["list"], data=list[kind], **more)


PAGED: dict[str, Any] = {"has_more": bool, "first_id": str | None, "last_id": str | None}
# The type in the official client of each schema of the document.
CLIENT_TYPES: dict[str, Any] = {
    "Batch": openai.types.Batch,
    "CreateChatCompletionResponse": chat.ChatCompletion,
    "CreateChatCompletionStreamResponse": chat.ChatCompletionChunk,
    COMPLETION: openai.types.Completion,
    "CreateEmbeddingRequest": openai.types.EmbeddingCreateParams,
    "CreateEmbeddingResponse": openai.types.CreateEmbeddingResponse,
    "DeleteFileResponse": openai.types.FileDeleted,
    "ErrorResponse": create_model("ErrorResponse", error=shared.ErrorObject),
    "ListBatchesResponse": listing("ListBatchesResponse", openai.types.Batch, **PAGED),
    "ListFilesResponse": listing("ListFilesResponse", openai.types.FileObject, **PAGED),
    "ListModelsResponse": listing("ListModelsResponse", openai.types.Model),
    "Model": openai.types.Model,
    "OpenAIFile": openai.types.FileObject,
    "Response": responses.Response,
    "ResponseItemList": responses.ResponseItemList,
    STREAM_EVENTS: responses.ResponseStreamEvent,
}


def schemas_of_client() -> dict[str, Any]:
    """Return the schemas of CLIENT_TYPES. A field that may be null may also be left out there."""
    mode: Literal["validation"] = "validation"
    wanted = [(name, mode, TypeAdapter(kind)) for name, kind in CLIENT_TYPES.items()]
    found, parts = TypeAdapter.json_schemas(wanted, ref_template=REFERENCE + "{model}")
    named = {name: schema for (name, _), schema in found.items()}
    return named | parts["$defs"]  # a type of that very name is a reference to a part


def schemas_of_document(file: Path) -> dict[str, Any]:
    """Return the schemas of openapi.yaml."""
    with file.open("rb") as source:
        document = yaml.load(source, Loader=yaml.CSafeLoader)
    return with_nulls(document["components"]["schemas"])  # type: ignore[no-any-return]


class OpenAISpec:
    """Schemas by name."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self.validator = cache(self._validator)

    def check(self, name: str, value: Any) -> None:
        """Raise jsonschema.ValidationError unless `value` has the schema of this name."""
        self.validator(name).validate(value)

    def check_completion(self, completion: dict[str, Any]) -> None:
        """Check a whole text completion.

        The first token of an echoed prompt follows nothing. It has no logprob in OpenAI's API, too,
        although the schema has no null there.
        """
        choices = []
        for choice in completion["choices"]:
            logprobs = choice["logprobs"]
            if logprobs is not None and logprobs["token_logprobs"][:1] == [None]:
                logprobs = {name: values[1:] for name, values in logprobs.items()}
            choices.append({**choice, "logprobs": logprobs})
        self.check(COMPLETION, {**completion, "choices": choices})

    def check_completion_chunks(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Check the chunks of a text completion.

        OpenAI sends two nulls that the schema lacks, because whole answers have the same one. Only
        the last chunk of a choice has a reason. By the text of `stream_options`, only the last
        chunk of all has the usage, and no choices.
        """
        for chunk in chunks:
            shown = {name: value for name, value in chunk.items() if value is not None}
            assert ("usage" in shown) == (not shown["choices"])
            choices = []
            for choice in shown["choices"]:
                choices.append({**choice, "finish_reason": choice["finish_reason"] or "stop"})
            self.check_completion({**shown, "choices": choices})

    def check_event(self, event: Any) -> None:
        """Check an event of a streamed response with the schema of its type."""
        self.check(self._event_schemas()[event["type"]], event)

    def _validator(self, name: str) -> Draft202012Validator:
        root = {"$ref": f"{REFERENCE}{name}", "components": {"schemas": self._schemas}}
        return Draft202012Validator(root)

    def _event_schemas(self) -> dict[str, str]:
        """Return the names of the schemas of stream events, by type."""
        found = {}
        for member in self._schemas[STREAM_EVENTS]["anyOf"]:
            name = member["$ref"].rpartition("/")[2]
            kind = self._schemas[name]["properties"]["type"]
            found[kind.get("const") or kind["enum"][0]] = name
        return found


def chunks_of(stream: str) -> list[dict[str, Any]]:
    """Return the objects of a stream of chunks, which must be well formed and end with [DONE]."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def sse_events(stream: str) -> list[dict[str, Any]]:
    """Return the data of named server-sent events, each checked to be named after its type."""
    *events, rest = stream.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        if event.startswith(":"):
            continue  # a ping
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def check_every_fault_is_seen(spec: OpenAISpec, name: str, value: dict[str, Any]) -> None:
    """Check that the schema refuses a value that lacks a field, so that the tests can fail."""
    broken = {key: item for key, item in value.items() if key not in ("id", "object")}
    assert list(spec.validator(name).iter_errors(broken))
