"""Fixtures of the APIs: OpenAI's schemas."""

from __future__ import annotations

import pytest

from tests.support.openai_spec import OpenAISpec, schemas_of_client, schemas_of_document
from tests.support.reference_data import located, reference

CLIENT, DOCUMENT = "client", "openai-spec/openapi.yaml"


@pytest.fixture(scope="session", params=[CLIENT, reference(DOCUMENT)])
def spec(request: pytest.FixtureRequest) -> OpenAISpec:
    """The schemas of the official client, and those of OpenAI's document."""
    is_client = request.param == CLIENT
    return OpenAISpec(schemas_of_client() if is_client else schemas_of_document(located(DOCUMENT)))
