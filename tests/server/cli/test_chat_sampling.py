"""`penstock chat` sends the sampling values that a server suggests for its model."""

from __future__ import annotations

from tests.server.cli.test_chat import Api, api, chat, talk

__all__ = ["api"]  # the fixture


def test_chat_sends_and_shows_the_sampling_values_that_the_model_does_not_give(api: Api) -> None:
    api.models = [{"id": "first", "client_sampling": {"temperature": 0.7, "min_p": 0.05}}]
    answer = talk(api)
    assert api.asked[0].items() >= {"temperature": 0.7, "min_p": 0.05}.items()
    assert "Sampling: temperature 0.7, min_p 0.05 (the model gives none)\n" in answer.stderr
    answer = chat("--url", api.url, "--quick", "hi", "--temperature", "0")
    assert api.asked[1].items() >= {"temperature": 0, "min_p": 0.05}.items()
    assert "Sampling: min_p 0.05 (the model gives none)\n" in answer.stderr


def test_chat_with_a_server_without_suggestions_sends_no_sampling_values(api: Api) -> None:
    api.models = [{"id": "first", "client_sampling": None}]
    assert "Sampling" not in talk(api).stderr
    assert api.asked[0].keys().isdisjoint({"temperature", "top_p", "min_p"})
