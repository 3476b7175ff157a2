"""Real encoders give the vectors of sentence-transformers: 200 texts, alone and in one batch."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support import web
from tests.support.real_checkpoints import (
    minilm_folder,
    mpnet_folder,
    sentence_transformers_python,
)
from tests.support.reference_data import hard_texts
from tests.support.serve import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FOLDERS = {"minilm": minilm_folder, "mpnet": mpnet_folder}
NUM_TEXTS = 200
EQUAL = 1e-5  # of numbers of vectors of length 1
CLOSE_IN_BF16 = 1e-4  # 1 - cosine
PROSE = """
The ferry left the harbour at dawn, and the gulls followed it out past the lighthouse. No one on
board had slept. In the kitchen a pot of rice was boiling over. Interest rates rose again in March;
lenders expect two more increases before the end of the year. A red-black tree keeps its height
below twice the logarithm of the number of its keys. How long does sourdough rest in a cold place?
She tuned the violin a quarter tone flat, which the orchestra took for a joke. Whales were hunted
here until 1932. To reset the password, open the settings and choose Security. Patients with a
fever above 39 °C should see a doctor within 24 hours.
"""
REFERENCE = """
import json, sys
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

torch.set_num_threads(1)
folder, texts, *files = sys.argv[1:]
for dtype, file in zip((torch.float32, torch.bfloat16), files, strict=True):
    options = {"model_kwargs": {"dtype": dtype}}
    model = SentenceTransformer(folder, device="cpu", local_files_only=True, **options)
    found = model.encode(json.load(open(texts)), batch_size=1, convert_to_tensor=True)
    np.save(file, found.float().numpy())
"""


def texts() -> list[str]:
    """Return short, long and hard texts. Some are longer than any limit, and are cut."""
    rng, words = random.Random(0), PROSE.split()
    found = [text for text in hard_texts() if text]
    while len(found) < NUM_TEXTS:
        start, length = rng.randrange(len(words)), int(2 ** rng.uniform(0, 9.3))
        found.append(" ".join((words * 7)[start : start + length]))
    return found


@dataclass(frozen=True)
class Real:
    folder: Path
    # [texts, size], of sentence-transformers text by text
    expected: np.ndarray
    expected_in_bf16: np.ndarray


@pytest.fixture(scope="module")
def reference_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_transformers_python(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=FOLDERS)
def real(
    request: pytest.FixtureRequest, reference_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Real:
    place = tmp_path_factory.mktemp(request.param)
    folder = FOLDERS[request.param](place)
    given, *files = (place / name for name in ("texts.json", "float32.npy", "bfloat16.npy"))
    given.write_text(json.dumps(texts()))
    subprocess.run([reference_python, "-c", REFERENCE, folder, given, *files], check=True)
    return Real(folder, *map(np.load, files))


@pytest.fixture(scope="module")
def server(real: Real) -> Iterator[Server]:
    with serving(real.folder, "--dtype", "float32") as server:
        yield server


def vectors(server: Server, given: list[str]) -> np.ndarray:
    body = {"input": given, "truncate_prompt_tokens": -1}
    response = web.post(f"{server.base_url}/v1/embeddings", json=body, timeout=900)
    assert response.status_code == 200, response.text
    return np.array([entry["embedding"] for entry in response.json()["data"]])


@pytest.fixture(scope="module")
def in_one_batch(server: Server) -> np.ndarray:
    """The vectors [texts, size] of one request."""
    return vectors(server, texts())


def test_vectors_in_one_batch_equal_those_of_the_library(
    real: Real, in_one_batch: np.ndarray
) -> None:
    assert in_one_batch.shape == real.expected.shape
    assert len(in_one_batch) == NUM_TEXTS
    assert np.abs(in_one_batch - real.expected).max() < EQUAL


def test_vectors_alone_are_those_of_the_batch(server: Server, in_one_batch: np.ndarray) -> None:
    alone = [vectors(server, [text]) for text in texts()]
    assert np.array_equal(np.concatenate(alone), in_one_batch)


def turns(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return 1 - cosine [texts] of vectors [texts, size]."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines: np.ndarray = (found * expected).sum(1) / lengths
    return 1 - cosines


def test_vectors_in_bfloat16_keep_their_direction(real: Real) -> None:
    """Rounded weights turn vectors by 3e-5. A few texts turn by more than 1e-4 in the library, too.

    Ours may then turn no further than the furthest of the library.
    """
    with serving(real.folder, "--dtype", "bfloat16") as server:
        ours = turns(vectors(server, texts()), real.expected)
    theirs = turns(real.expected_in_bf16, real.expected)
    assert ours.mean() <= min(CLOSE_IN_BF16, 1.05 * theirs.mean())
    assert (ours <= CLOSE_IN_BF16).mean() >= 0.95
    assert ours.max() <= max(CLOSE_IN_BF16, theirs.max())
