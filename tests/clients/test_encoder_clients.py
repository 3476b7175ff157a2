"""Other people's clients of encoders, unchanged, with real servers: a table of what they can do.

A runner per environment embeds and ranks the same texts with one client or several. Each cell
compares the result with that of plain HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tests.clients.environments import HERE, VECTORS, vectors_python_of
from tests.clients.reports import Cell, rendered, run_script
from tests.support import web
from tests.support.cross_encoder_cases import CASES, TOKENIZER
from tests.support.sentence_folder import sentence_folder
from tests.support.serve import Server, serving
from tests.support.tiny_bert import tiny_bert

# The first run installs the clients.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

KEY = "sk-clients"
CELLS = ("one", "many", "dimensions", "rerank", "too long", "wrong key", "token ids")
OF_COHERE = "embed-english-v3.0"  # llama-index takes only names of Cohere's models
TEXTS = (
    "How do I bake bread?",
    "a recipe for a loaf of sourdough",
    "the stock market fell",
    "flour, water, salt",
    "x",
)
QUERY = TEXTS[0]
LONG = "the flour " * 200


def post(server: Server, path: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {KEY}"}
    response = web.post(f"{server.base_url}{path}", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(server: Server, **body: Any) -> list[list[float]]:
    return [entry["embedding"] for entry in post(server, "/v1/embeddings", **body)["data"]]


def write_encoder(folder: Path) -> Path:
    """Write a sentence encoder with random weights, whose vectors are normalised."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    bare = tiny_bert(folder / "bare", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(bare / "tokenizer.json"))
    return sentence_folder(bare, folder / "sentence", {"pooling_mode": "mean"}, "Normalize")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_encoder(tmp_path_factory.mktemp("encoder"))
    names = ("--served-model-name", "minilm", "--served-model-name", OF_COHERE)
    with serving(folder, *names, "--allow-dimensions", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    [case] = [case for case in CASES if case.name == "bert"]
    folder = case.write(tmp_path_factory.mktemp("reranker") / "model")
    with serving(folder, "--served-model-name", "reranker", "--api-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def tiktoken() -> Path:
    """A folder with OpenAI's vocabularies: LangChain would download them."""
    [folder] = (
        vectors_python_of("llama_index")
        .parents[1]
        .glob("lib/*/site-packages/llama_index/core/_static/tiktoken_cache")
    )
    return folder


@pytest.fixture(scope="module")
def target(encoder: Server, reranker: Server, tiktoken: Path) -> dict[str, Any]:
    """The Target of the runners."""
    ranking = post(reranker, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    assert len({entry["relevance_score"] for entry in ranking}) == len(TEXTS)
    [short] = vectors(encoder, input=TEXTS[0], dimensions=8)
    return {
        "url": encoder.base_url,
        "rerank_url": reranker.base_url,
        "key": KEY,
        "texts": TEXTS,
        "vectors": vectors(encoder, input=TEXTS),
        "short": short,
        "query": QUERY,
        "ranking": [(entry["index"], entry["relevance_score"]) for entry in ranking],
        "long": LONG,
        "tiktoken": str(tiktoken),
    }


@pytest.fixture(scope="module")
def table() -> Iterator[list[Cell]]:
    """The cells of all clients, printed at the end."""
    table: list[Cell] = []
    yield table
    print("\n\n" + rendered(table, CELLS))


@pytest.mark.parametrize("name", VECTORS)
def test_client_of_encoders_gets_the_numbers_of_plain_http(
    name: str, target: dict[str, Any], table: list[Cell]
) -> None:
    script = HERE / "python" / f"vectors_{name}.py"
    run_script([vectors_python_of(name), script], target, CELLS, table)
