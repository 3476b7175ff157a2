"""The sampling values of Penstock's own clients, where a checkpoint gives none."""

from __future__ import annotations

import pytest

from server.text.generation_config import client_sampling


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}),
        ({"temperature": 0.3}, {"top_p": 0.95, "min_p": 0.05}),
        ({"temperature": 0.0}, {"top_p": 0.95, "min_p": 0.05}),
        ({"top_p": 1.0}, {"temperature": 0.7, "min_p": 0.05}),
        ({"min_p": 0.0, "top_k": 20}, {"temperature": 0.7, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9, "min_p": 0.1}, {}),
        ({"repetition_penalty": 1.1}, {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}),
    ],
)
def test_client_sampling_has_the_values_that_the_checkpoint_does_not_give(
    given: dict[str, float], own: dict[str, float]
) -> None:
    assert client_sampling(given) == own
