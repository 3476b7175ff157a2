"""The suites of llm-comply, which check answers against OpenAI's and Anthropic's schemas."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.environments import installed
from tests.support import web
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import write_seeing

# The first run installs the suites.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

KEY = "sk-clients"
RUN_S = 180
# Tests of each suite that fail, because the server does what the reason says.
IMAGE = "images are refused by name"
MODEL = "a request without a model is answered by the served one"
# The published schema requires `citations`, null or a list. Anthropic's own API leaves it out, and
# @ai-sdk/anthropic refuses null.
CITATIONS = "{'type': 'text', 'text': "
FAILING = {
    "open-responses": {"image-input": IMAGE, "error-handling": MODEL},
    "openai-chat": {"chat-image-input": IMAGE, "chat-error-handling": MODEL},
    "anthropic": {
        "anth-image-input": IMAGE,
        **dict.fromkeys(
            ("anth-basic-response", "anth-system-prompt", "anth-multi-turn"), CITATIONS
        ),
    },
}


# The test of each suite that sends an image.
WITH_IMAGE = {
    suite: next(name for name, reason in failing.items() if reason is IMAGE)
    for suite, failing in FAILING.items()
}
MODEL_NAME = "demo"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny SmolVLM with random weights."""
    folder = write_seeing(tmp_path_factory.mktemp("seeing") / "model")
    with serving(folder, "--api-key", KEY, "--served-model-name", MODEL_NAME) as server:
        yield server


def results_of(server: Server, suite: str, *flags: str) -> list[dict[str, Any]]:
    """Run a suite, or what its `flags` choose of it; print and return the results."""
    script = installed("llm_comply", ("llm-comply==0.5.0",)).with_name("llm-comply")
    target = ["--base-url", f"{server.base_url}/v1", "--api-key", KEY, "--model", MODEL_NAME]
    done = subprocess.run(
        [script, *target, "--format", suite, "--json", *flags],
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    for result in results:
        print(f"{suite}, {result['id']}: {result['status']}")
    return results


def images_shown(server: Server) -> float:
    """Return how many images the model has seen; equal ones are encoded once."""
    headers = {"authorization": f"Bearer {KEY}"}
    found = web.get(f"{server.base_url}/metrics", headers=headers, timeout=30).text
    # There are no such series before the first request.
    counts = re.findall(r"^penstock:images_(?:encoded|reused)\S* (\S+)$", found, re.MULTILINE)
    return sum(map(float, counts))


@pytest.mark.parametrize("suite", FAILING)
def test_llm_comply_with_the_demo_model_passes_but_for_the_named_tests(
    server: Server, suite: str
) -> None:
    results = results_of(server, suite)
    failed = {each["id"]: each["errors"] for each in results if each["status"] == "failed"}
    assert sorted(failed) == sorted(FAILING[suite]), json.dumps(failed, indent=2)
    for name, reason in FAILING[suite].items():
        if reason is CITATIONS:  # nothing else is wrong with the answer
            assert [error[: len("content.0: ")] for error in failed[name]] == ["content.0: "]
            assert CITATIONS in failed[name][0]
    assert any(result["status"] == "passed" for result in results)


@pytest.mark.parametrize("suite", FAILING)
def test_llm_comply_with_a_model_that_sees_passes_its_image_test(
    seeing: Server, suite: str
) -> None:
    before = images_shown(seeing)
    [result] = results_of(seeing, suite, "--filter", WITH_IMAGE[suite])
    errors = result.get("errors", [])
    if suite == "anthropic":
        [error] = errors  # as of all its tests
        assert CITATIONS in error
    else:
        assert result["status"] == "passed", errors
    assert images_shown(seeing) == before + 1
