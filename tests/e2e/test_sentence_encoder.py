"""A real sentence encoder and server: reference vectors, the official client, concurrency."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from server.text.load_tokenizer import load_tokenizer
from tests.support import web
from tests.support.process import eventually
from tests.support.serve import Server, serving, starting
from tests.support.snapshots import POOLED, QUESTION, SOURCES, TOLERANCES, expected

SENTENCE = "the rate of change over time is what a derivative of some function tells us about it"
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[i % 7 :][: 1 + i] * (1 + i // 9)) for i in range(32)]


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Server]:
    flags = ("--served-model-name", "minilm", "--dtype", "float32", "--allow-dimensions")
    with serving(minilm, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def cls_server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the same weights with CLS pooling, no normalisation and all 512 positions."""
    folder = tmp_path_factory.mktemp("cls") / "model"
    variant(minilm, folder, ["Transformer", "Pooling"], {"pooling_mode": "cls"})
    with serving(folder, "--max-model-len", 512, "--dtype", "float32") as server:
        yield server


def variant(minilm: Path, folder: Path, modules: list[str], pooling: dict[str, Any]) -> None:
    shutil.copytree(minilm, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    listed = [
        {"path": f"{i}_{kind}" * (i > 0), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    for name, content in (("modules.json", listed), ("1_Pooling/config.json", pooling)):
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(content))


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as sdk:
        yield sdk


def post(server: Server, path: str = "/v1/embeddings", **body: Any) -> httpx2.Response:
    return web.post(f"{server.base_url}{path}", json=body, timeout=120)


def vectors(server: Server, **body: Any) -> np.ndarray:
    response = post(server, **body)
    assert response.status_code == 200, response.text
    return np.array([entry["embedding"] for entry in response.json()["data"]], dtype=np.float32)


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(1) / lengths


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", POOLED)
@pytest.mark.variants(2)
def test_embeddings_equal_the_vectors_of_the_source(
    server: Server, cls_server: Server, minilm: Path, source: str, name: str
) -> None:
    texts, mode = POOLED[name]
    found = vectors(server if mode == "mean" else cls_server, input=texts)
    due = expected(source, name, minilm)
    assert cosines(found, due).min() > 0.9999
    if mode == "mean":
        due = due / np.linalg.norm(due, axis=1, keepdims=True)
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.abs(found - due).max() < TOLERANCES[source]


def test_openai_client_gets_equal_vectors_in_every_format(
    server: Server, sdk: openai.OpenAI, minilm: Path
) -> None:
    default = sdk.embeddings.create(model="minilm", input=TEXTS[:5])  # base64 by default
    floats = sdk.embeddings.create(model="minilm", input=TEXTS[:5], encoding_format="float")
    assert (default.object, default.model) == ("list", "minilm")
    assert [entry.index for entry in default.data] == list(range(5))
    assert {len(entry.embedding) for entry in default.data} == {384}
    for one, other in zip(default.data, floats.data, strict=True):
        assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))
    tokenizer = load_tokenizer(minilm)
    lists = [tokenizer.encode(text) for text in TEXTS[:5]]
    total = sum(map(len, lists))
    assert (default.usage.prompt_tokens, default.usage.total_tokens) == (total, total)
    for given in (lists, lists[3]):
        answer = sdk.embeddings.create(model="minilm", input=given)
        expected = default.data if given is lists else default.data[3:4]
        assert [e.embedding for e in answer.data] == [e.embedding for e in expected]
    short = sdk.embeddings.create(model="minilm", input=QUESTION, dimensions=100)
    whole = np.array(sdk.embeddings.create(model="minilm", input=QUESTION).data[0].embedding)
    expected = whole[:100] / np.linalg.norm(whole[:100])
    assert np.allclose(short.data[0].embedding, expected, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_embed_like_one_over_http(server: Server, minilm: Path) -> None:
    flags = ("--served-model-name", "minilm", "--dtype", "float32", "--tensor-parallel-size", 2)
    with serving(minilm, *flags) as ranks:
        found, due = vectors(ranks, input=TEXTS), vectors(server, input=TEXTS)
    assert np.linalg.norm(found - due) <= 1e-6 * np.linalg.norm(due)


async def test_32_concurrent_requests_equal_single_ones(server: Server) -> None:
    alone = [vectors(server, input=text)[0] for text in TEXTS]
    async with server.http() as http:
        bodies = [{"input": (TEXTS[i:] + TEXTS)[: 1 + i % 7]} for i in range(32)]
        answers = await asyncio.gather(*(http.post("/v1/embeddings", json=b) for b in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code == 200, answer.text
        for text, entry in zip(body["input"], answer.json()["data"], strict=True):
            assert np.array_equal(np.float32(entry["embedding"]), alone[TEXTS.index(text)])
    server.wait_idle()


def test_client_disconnect_aborts_the_waiting_texts(server: Server) -> None:
    body = json.dumps({"input": [" ".join(WORDS * 3)] * 200}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    labels = 'engine="0",model_name="minilm",reason="disconnect"'
    for number in (1, 2):
        with socket.create_connection(server.address, timeout=30) as connection:
            connection.sendall(
                f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\n{head}\r\n".encode()
            )
            connection.sendall(body)
            eventually(lambda: server.metric("num_requests_waiting") > 20, "texts wait")
        line = f"penstock:aborts_total{{{labels}}} {number}"
        eventually(lambda line=line: line in metrics(server), "the abort is counted")
        server.wait_idle()
    assert web.get(f"{server.base_url}/health").json()["status"] == "ok"
    assert vectors(server, input=QUESTION).shape == (1, 384)


def metrics(server: Server) -> str:
    return web.get(f"{server.base_url}/metrics", timeout=30).text


def test_embeddings_with_invalid_parameters_are_refused(
    server: Server, cls_server: Server, sdk: openai.OpenAI
) -> None:
    def refusal(**fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.embeddings.create(**{"model": "minilm", "input": "x", **fields})
        return caught.value

    assert refusal(input="").param == "input"
    assert refusal(input=["x", ""]).param == "input.1"
    assert refusal(dimensions=385).param == "dimensions"
    assert refusal(extra_body={"normalize": "no"}).param == "normalize"
    long = "word " * 300
    error = refusal(input=["x", long])
    assert (error.param, error.code) == ("input.1", "context_length_exceeded")
    assert "256" in error.message
    assert "302" in error.message
    cut = sdk.embeddings.create(
        model="minilm", input=long, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 256
    assert vectors(cls_server, input=long).shape == (1, 384), "--max-model-len is 512 there"
    with pytest.raises(openai.BadRequestError, match="makes embeddings"):
        sdk.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="other", input="x")


def test_score_of_similar_texts_is_higher(server: Server) -> None:
    question = "How do I bake bread?"
    texts = ["A recipe for a loaf of sourdough.", "The stock market fell on Monday.", question]
    body = post(server, "/v1/score", text_1=question, text_2=texts).json()
    bread, stocks, same = (entry["score"] for entry in body["data"])
    assert bread > 0.4 > 0.2 > stocks
    assert same == pytest.approx(1, abs=1e-5)


def test_banner_describes_the_encoder_and_its_curl_line_works(
    server: Server, cls_server: Server
) -> None:
    assert "vectors   384 dimensions, mean pooling, normalised (modules.json)" in server.log
    assert "texts     up to 256 tokens" in server.log
    assert "cls pooling, not normalised (modules.json)" in cls_server.log
    assert "texts     up to 512 tokens" in cls_server.log
    assert "KV cache" not in server.log.partition("serves minilm")[2]
    line = server.wait_for(r"try +(curl .*)\n")[1]
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", line], capture_output=True, timeout=30)
        assert len(json.loads(answer.stdout)["data"][0]["embedding"]) == 384


@pytest.mark.slow
def test_serve_with_unsupported_modules_exits_with_2(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cnn"
    variant(minilm, folder, ["Transformer", "Pooling", "CNN"], {"pooling_mode": "mean"})
    with starting(folder) as server:
        assert server.status() == 2
        assert "modules.json lists Transformer, Pooling, CNN" in server.last_line
