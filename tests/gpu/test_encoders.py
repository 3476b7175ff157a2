"""Encoders on a GPU: hidden states are the reference's, alone and in one batch."""

from __future__ import annotations

import pytest
import torch

from tests.engine.models import (
    test_embedding_gemma,
    test_modernbert,
    test_mpnet,
    test_nomic_bert,
    test_roberta,
)
from tests.support.encoders import Encoder, hidden_states
from tests.support.golden import load

pytestmark = pytest.mark.gpu
CLOSE = 1e-3  # a GPU sums in another order; a missing feature changes hidden states by 0.05 or more
# A relative bias; windows to both sides with rotary positions; grouped heads; a norm at the end.
CASES = {
    "roberta": test_roberta.CASE,
    "mpnet": test_mpnet.CASE,
    "modernbert": test_modernbert.CASE,
    "nomic-bert": test_nomic_bert.CASE,
    "embedding-gemma": test_embedding_gemma.CASE,
}


@pytest.fixture(scope="module", params=CASES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_hidden_states_of_a_batch_equal_the_reference(encoder: Encoder, cuda: str) -> None:
    runner = load(encoder.folder, device=cuda, attention_backend="triton")
    for found, due in zip(hidden_states(runner, encoder.texts), encoder.expected, strict=True):
        torch.testing.assert_close(found.cpu().double(), due, rtol=0, atol=CLOSE)


def test_vectors_do_not_depend_on_the_other_texts(encoder: Encoder, cuda: str) -> None:
    together = encoder.driver(device=cuda)
    ids = [together.embed(text) for text in encoder.texts]
    together.run()
    for text, number in zip(encoder.texts, ids, strict=True):
        alone = encoder.driver(device=cuda)
        single = alone.embed(text)
        alone.run()
        found, due = together.vector(number), alone.vector(single)
        assert float((found - due).abs().max()) < 1e-4
