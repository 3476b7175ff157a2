"""The fields that ask for structured output: OpenAI's, and the names that other servers use."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.api.openai.schemas.fields import by_type, having
from server.http.body import MAX_PARTS, MAX_TEXT, Part, Text, failure, small
from server.text import exact_json
from server.text.wanted_grammar import GrammarKind, WantedGrammar

MAX_CHOICES = 4096
Source = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Choices = Annotated[list[Source], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
Schema = Annotated[dict[str, Any], BeforeValidator(small)]
ANY_OBJECT: Schema = {"type": "object"}


class NamedSchema(Part):
    """`strict` changes nothing: the answer always follows the schema."""

    name: str | None = None
    """Has no effect."""
    description: Text | None = None
    """Has no effect."""
    strict: bool | None = None
    """Changes nothing."""
    value: Annotated[Schema | None, Field(alias="schema")] = None
    """A JSON schema."""


class TextFormat(Part):
    type: Literal["text"]


class JsonObjectFormat(Part):
    """`schema` is llama.cpp's: instructor's JSON_SCHEMA mode sends it."""

    type: Literal["json_object"]
    value: Annotated[Schema | None, Field(alias="schema")] = None
    """A JSON schema that the object fits."""


class JsonSchemaFormat(Part):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Part):
    """vLLM's: texts, free text and constrained parts. See docs/generation.md."""

    type: Literal["structural_tag"]
    format: Schema | None = None
    structures: Annotated[list[Schema], Field(max_length=MAX_PARTS)] | None = None
    triggers: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | SkipJsonSchema[Annotated[StructuralTagFormat, Tag("<structural_tag>")]],
    by_type("text, json_object, json_schema or structural_tag"),
]
KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
NAMED_KINDS = ("regex", "choice", "grammar", "structural_tag")
PARSED_KINDS = ("json_schema", "structural_tag")


class StructuredOutputs(Part):
    """vLLM's field. Exactly one of its kinds says what the answer must be."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                *(
                    having(**{name: {"type": ["object", "string"]}})
                    for name in ("json", "structural_tag")
                ),
                *(having(**{name: {"type": "string"}}) for name in ("regex", "grammar")),
                having(choice={"type": "array"}),
                having(json_object={"const": True}),
            ]
        }
    )

    schema_: Annotated[Schema | Source | None, Field(alias="json")] = None
    """A JSON schema, or its text."""
    regex: Source | None = None
    """A regular expression."""
    choice: Choices | None = None
    """One of these texts."""
    grammar: Source | None = None
    """A grammar in GBNF or Lark."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: Schema | Source | None = None
    """Texts around parts that follow a grammar, as in vLLM: a `structural_tag` or its text."""
    whitespace_pattern: Source | None = None
    """A regular expression for the space inside JSON; default: 8 characters at most."""
    disable_any_whitespace: bool | None = None
    """No space is allowed inside JSON, except in texts."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if len(self._given()) != 1:
            names = "json, regex, choice, grammar, json_object and structural_tag"
            raise failure("invalid", f"needs exactly one of {names}")
        return self

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in NAMED_KINDS}
        given |= {"json": self.schema_, "json_object": ANY_OBJECT if self.json_object else None}
        return {name: value for name, value in given.items() if value is not None}

    def wanted(self, param: str) -> WantedGrammar:
        [(name, value)] = self._given().items()
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        kind, param = KINDS[name], f"{param}.{name}"
        return WantedGrammar(param, kind, parsed(kind, value, param), whitespace)


def parsed(kind: GrammarKind, value: Any, param: str) -> Any:
    """Return a schema or structural tag that was given as a text as the object that it is."""
    if kind not in PARSED_KINDS or not isinstance(value, str):
        return value
    try:
        found = exact_json.loads(value)
    except json.JSONDecodeError as error:
        raise failure("invalid", f"is not valid JSON: {error}", *param.split(".")) from None
    if kind == "structural_tag" and not isinstance(found, dict):
        raise failure("invalid", "must be a JSON object", *param.split("."))
    return found


def of_response_format(given: ResponseFormat) -> WantedGrammar | None:
    match given:
        case TextFormat():
            return None
        case StructuralTagFormat():
            tag = given.model_dump(exclude_none=True)
            return WantedGrammar("response_format", "structural_tag", tag)
        case JsonObjectFormat():
            param, schema = "response_format.schema", given.value
        case JsonSchemaFormat():
            param, schema = "response_format.json_schema.schema", given.json_schema.value
    return WantedGrammar(param, "json_schema", ANY_OBJECT if schema is None else schema)
