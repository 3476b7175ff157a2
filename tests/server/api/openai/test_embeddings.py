"""/v1/embeddings and /v1/score with a fake encoder: inputs, formats, limits, errors, aborts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import BOS
from tests.support.fake_encoder import ENCODER, SIZE, FakeEncoder, vector
from tests.support.rig import Served, eventually, serving

PATHS = ("/v1/embeddings", "/v1/score", "/score")


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda r: []), model) as served:
        yield served


def ids(text: str) -> list[int]:
    """Return the ids that conftest's byte tokenizer gives for ASCII letters."""
    return [BOS, *(ord(char) - 33 for char in text)]


async def post(served: Served, path: str = "/v1/embeddings", **body: Any) -> Any:
    return await served.http.post(path, json=body)


async def refusal(served: Served, path: str = "/v1/embeddings", **body: Any) -> tuple[Any, ...]:
    response = await post(served, path, **body)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return response.status_code, error["param"], error["code"], error["message"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [ids("ab")]),
        (["ab", "x", "ab"], [ids("ab"), ids("x"), ids("ab")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_embeddings_input_of_any_shape_returns_a_vector_per_text(
    encoder: Served, given: Any, tokens: list[list[int]]
) -> None:
    body = (await post(encoder, input=given)).json()
    assert [text.tokens for text in encoder.engine.texts] == tokens
    assert body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", "tiny")
    total = sum(map(len, tokens))
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
    for index, (entry, expected) in enumerate(zip(body["data"], tokens, strict=True)):
        assert (entry["object"], entry["index"]) == ("embedding", index)
        assert entry["embedding"] == vector(expected).tolist()


async def test_embeddings_base64_is_little_endian_float32_and_openai_client_decodes_it(
    encoder: Served,
) -> None:
    body = (await post(encoder, input=["ab", "x"], encoding_format="base64")).json()
    for entry, text in zip(body["data"], ("ab", "x"), strict=True):
        raw = base64.b64decode(entry["embedding"])
        assert np.array_equal(np.frombuffer(raw, "<f4"), vector(ids(text)))
    # Without encoding_format the client requests base64 and decodes it.
    answer = await encoder.openai.embeddings.create(model="tiny", input=["ab", "x"])
    assert [entry.embedding for entry in answer.data] == [
        vector(ids(text)).tolist() for text in ("ab", "x")
    ]


async def test_embeddings_with_dimensions_are_cut_then_normalised(
    model: Path, tmp_path: Path
) -> None:
    folder = encoder_folder(tmp_path / "unit", model, normalise=True)
    for path, unit in ((model, False), (folder, True)):
        async with serving(FakeEncoder(lambda r: []), path, allow_dimensions=True) as served:
            for size in (None, SIZE, 2, 1):
                body = (await post(served, input="ab", dimensions=size)).json()
                expected = vector(ids("ab"))[:size]
                if unit:
                    expected = expected / np.linalg.norm(expected)
                assert body["data"][0]["embedding"] == pytest.approx(expected.tolist())


def encoder_folder(folder: Path, model: Path, **wanted: bool) -> Path:
    """Copy `model` and add the files of a sentence encoder: CLS pooling, up to 12 tokens."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    kinds = ["Transformer", "Pooling", *(["Normalize"] if wanted.get("normalise") else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{k}" * (i > 0),
            "type": f"sentence_transformers.models.{k}",
        }
        for i, k in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    texts = {"max_seq_length": 12, "do_lower_case": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(texts))
    return folder


async def test_embeddings_follow_sentence_transformers_files(model: Path, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path / "cls", model)
    async with serving(FakeEncoder(lambda r: []), folder) as served:
        assert (await post(served, input=["ABc"[:2], "a" * 11])).status_code == 200
        assert served.engine.texts[0].tokens == ids("ab"), "do_lower_case is set"
        assert (await served.http.get("/v1/models/cls")).json()["max_model_len"] == 12
        _, param, code, message = await refusal(served, input=["a", "a" * 12])
        assert (param, code) == ("input.1", "context_length_exceeded")
        assert "12 tokens" in message
        assert "13" in message


async def test_embeddings_text_far_over_limit_is_refused_after_its_start(
    encoder: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.text.tokenizer.BEGINNING", 9000)
    long = "abcdefghij" * 10_000
    _, param, code, message = await refusal(encoder, input=["a", long])
    assert (param, code) == ("input.1", "context_length_exceeded")
    assert "512 tokens" in message
    assert "9000 in its first 9000 characters" in message
    assert not encoder.engine.texts


async def test_embeddings_truncate_only_with_truncate_prompt_tokens(encoder: Served) -> None:
    long = "abcdefghij" * 60
    _, param, code, message = await refusal(encoder, input=long)
    assert (param, code) == ("input", "context_length_exceeded")
    assert "512 tokens" in message
    assert "601" in message
    assert not encoder.engine.texts
    for asked, kept in ((-1, 512), (512, 512), (5, 5), (2, 2)):
        await post(encoder, input=[long, "a"], truncate_prompt_tokens=asked)
        *_, cut, short = encoder.engine.texts
        assert cut.tokens == ids(long)[:kept]
        assert short.tokens == ids("a")
        await post(encoder, input=[[7] * 600], truncate_prompt_tokens=asked)
        assert encoder.engine.texts[-1].tokens == [7] * kept
    for asked in (513, 0, 1):  # with 1 there would only be room for BOS
        status, param, _, message = await refusal(encoder, input="a", truncate_prompt_tokens=asked)
        assert (status, param) == (400, "truncate_prompt_tokens")
        assert f"not {asked}" in message


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input.1", "invalid_value"),
        ({"input": [[1], []]}, "input.1", "invalid_value"),
        ({"input": [[1], [258]]}, "input.1", "invalid_value"),
        ({"input": [1, -1]}, "input.1", "invalid_value"),
        ({"input": ["a", True]}, "input.1", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 5}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
async def test_embeddings_bad_parameter_returns_400_naming_it(
    encoder: Served, body: dict[str, Any], param: str, code: str
) -> None:
    status, named, given, message = await refusal(encoder, **body)
    assert (status, named, given) == (400, param, code)
    assert param.partition(".")[0] in message or "Token id 258" in message
    assert not encoder.engine.texts


async def test_embeddings_too_many_dimensions_names_limit_and_value(encoder: Served) -> None:
    *_, message = await refusal(encoder, input="a", dimensions=7)
    assert f"from 1 to {SIZE}" in message
    assert "not 7" in message


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_fields_of_encoder_routes_are_named_in_the_header(
    encoder: Served, path: str
) -> None:
    fields = {"input": "a"} if "emb" in path else {"text_1": "a", "text_2": "b"}
    answer = await post(encoder, path, **fields, user="me", temperature=1, input_type=None)
    assert answer.headers["x-ignored-params"] == "temperature"


async def test_embeddings_largest_batch_keeps_order(encoder: Served) -> None:
    encoder.engine.delay = 0
    lists = [[1 + i % 60] * (1 + i % 3) for i in range(2048)]
    body = (await post(encoder, input=lists, priority=-5)).json()
    assert [entry["index"] for entry in body["data"]] == list(range(2048))
    assert [e["embedding"] for e in body["data"]] == [vector(tokens).tolist() for tokens in lists]
    assert {text.priority for text in encoder.engine.texts} == {-5}


async def test_encoder_routes_unknown_model_is_404_and_alias_works(model: Path) -> None:
    names = ("org/mini", "alias")
    async with serving(FakeEncoder(lambda r: []), model, served_model_name=names) as served:
        for path in PATHS:
            fields = {"input": "a"} if "emb" in path else {"text_1": "a", "text_2": "b"}
            assert (await post(served, path, model="tiny", **fields)).status_code == 404
            assert (await post(served, path, model="alias", **fields)).json()["model"] == "alias"
            assert (await post(served, path, **fields)).json()["model"] == "org/mini"


@pytest.mark.parametrize("path", PATHS[1:])
async def test_score_pairs_returns_cosines(encoder: Served, path: str) -> None:
    def cosine(one: str, other: str) -> float:
        a, b = vector(ids(one)), vector(ids(other))
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    for first, second, pairs in (
        ("ab", "x", [("ab", "x")]),
        ("ab", ["x", "yz", "ab"], [("ab", "x"), ("ab", "yz"), ("ab", "ab")]),
        (["ab", "x"], ["yz", "w"], [("ab", "yz"), ("x", "w")]),
    ):
        body = (await post(encoder, path, text_1=first, text_2=second)).json()
        assert body.keys() == {"id", "object", "created", "model", "data", "usage"}
        assert body["id"].startswith("score-")
        for index, (entry, pair) in enumerate(zip(body["data"], pairs, strict=True)):
            assert (entry["object"], entry["index"]) == ("score", index)
            assert entry["score"] == pytest.approx(cosine(*pair), abs=1e-6)
    # Each text is encoded once: four texts with six letters in total, and a BOS each.
    assert body["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    for first, second in ((["a", "b"], "x"), (["a", "b"], ["x", "y", "z"])):
        status, param, _, message = await refusal(encoder, path, text_1=first, text_2=second)
        assert (status, param) == (400, "text_2")
        assert "text_1 has 2" in message
    assert (await refusal(encoder, path, text_1="a" * 600, text_2="x"))[1] == "text_1"
    assert (await refusal(encoder, path, text_1="a", text_2=["x", "y" * 600]))[1] == "text_2.1"


async def test_routes_of_other_model_kind_return_unsupported_model(
    encoder: Served, served: Served
) -> None:
    for response in (await encoder.chat(), await encoder.complete()):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_model")
        assert "/v1/embeddings" in error["message"]
    for path in PATHS:
        status, param, code, message = await refusal(served, path, input="a")
        assert (status, param, code) == (400, "model", "unsupported_model")
        assert "/v1/chat/completions" in message
    kinds = [(await s.http.get("/v1/models/tiny")).json()["kind"] for s in (encoder, served)]
    assert kinds == ["encoder", "decoder"]


async def test_embeddings_are_counted_in_metrics_without_kv_blocks(encoder: Served) -> None:
    encoder.engine.delay = 0.002
    await post(encoder, input=["ab", "abde"])
    metric = encoder.metric
    assert await metric("prompt_tokens_total") == 8
    assert await metric("request_prompt_tokens_count") == 2
    assert await metric("request_success_total", finished_reason="stop") == 2
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert await metric(f"{name}_seconds_count") == 2
    assert 0.002 < await metric("e2e_request_latency_seconds_sum") < 30
    assert await metric("kv_cache_usage_perc") == 0
    assert await metric("cache_config_info", num_gpu_blocks="0") == 1
    assert await metric("generation_tokens_total") == 0
    assert await metric("request_generation_tokens_count") == 0
    assert await metric("aborts_total") == 0


@pytest.mark.parametrize("path", PATHS)
async def test_encoder_routes_client_disconnect_aborts_waiting_texts(
    encoder: Served, path: str
) -> None:
    engine = encoder.engine
    engine.gate.clear()
    fields = {"input": ["a", "b"]} if "emb" in path else {"text_1": "a", "text_2": "b"}
    body = json.dumps(fields).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    _, writer = await asyncio.open_connection(*encoder.address)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}\r\n".encode() + body)
    await eventually(lambda: len(engine.waiting) == 2, "both texts wait")
    writer.transport.abort()
    await eventually(lambda: sorted(engine.aborted) == [1, 2], "both are aborted")
    assert not engine.waiting
    assert await encoder.metric("aborts_total", reason="disconnect") == 1
    assert await encoder.metric("aborts_total") == 1
    engine.gate.set()
    assert (await post(encoder, path, **fields)).status_code == 200


async def test_embeddings_non_finite_vector_returns_500_and_aborts_others(encoder: Served) -> None:
    encoder.engine.delay = 0.01
    response = await post(encoder, input=["a", "b", "c"])  # the fake encodes the last one first
    assert (response.status_code, response.json()["error"]["code"]) == (500, "numerical_error")
    assert sorted(encoder.engine.aborted) == [1, 2]
    assert await encoder.metric("aborts_total", reason="numerical") == 1
    assert (await post(encoder, input=["a", "b"])).status_code == 200


async def test_encoder_routes_overloaded_or_dead_engine_returns_503(encoder: Served) -> None:
    engine = encoder.engine
    engine.overloaded = True
    for path in PATHS:  # refused before the body is validated
        response = await post(encoder, path, nonsense=1)
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    engine.overloaded = False
    engine.gate.clear()
    answer = asyncio.create_task(post(encoder, input=["a", "b"]))
    await eventually(lambda: len(engine.waiting) == 2, "both texts wait")
    engine.die()
    response = await answer
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert await encoder.metric("aborts_total", reason="engine") == 1
    assert (await post(encoder, input="a")).status_code == 503


async def test_encoder_routes_loading_model_returns_503(model: Path) -> None:
    async with serving(FakeEncoder(lambda r: [], state="loading", info=None), model) as served:
        for path in PATHS:
            response = await post(served, path, input="a")
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "model_loading",
            )
        served.engine.state, served.engine.info = "ready", ENCODER
        assert (await post(served, input="a")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_rerank_sorts_documents_by_similarity(encoder: Served, path: str) -> None:
    documents: list[Any] = ["x", {"text": "ab"}, "yz", "abx"]
    query = vector(ids("ab"))

    def cosine(text: str) -> float:
        other = vector(ids(text))
        return float(query @ other / np.linalg.norm(query) / np.linalg.norm(other))

    answer = await post(encoder, path, query="ab", documents=documents, max_chunks_per_doc=1)
    assert answer.headers["x-ignored-params"] == "max_chunks_per_doc"
    body = answer.json()
    assert body.keys() == {"id", "model", "results", "usage"}
    results = body["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1)
    scores = [entry["relevance_score"] for entry in results]
    assert scores == sorted(scores, reverse=True)
    texts = ["x", "ab", "yz", "abx"]
    for entry in results:
        assert entry["document"] == {"text": texts[entry["index"]]}
        assert entry["relevance_score"] == pytest.approx(cosine(texts[entry["index"]]), abs=1e-6)
    fields = {"query": "ab", "documents": documents, "top_n": 2, "return_documents": False}
    few = (await post(encoder, path, **fields)).json()["results"]
    assert few == [{k: v for k, v in entry.items() if k != "document"} for entry in results[:2]]


@pytest.mark.parametrize("texts_first", [True, False])
async def test_rerank_takes_texts_and_objects_in_one_list(
    encoder: Served, texts_first: bool
) -> None:
    documents: list[Any] = ["x", {"text": "ab", "id": 7}, "yz", {"text": "zy"}]
    if not texts_first:
        documents.reverse()
    answer = await post(encoder, "/v1/rerank", query="ab", documents=documents)
    assert len(answer.json()["results"]) == 4
    assert answer.headers["x-ignored-params"] == "documents.id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", 5]}, "documents.1"),
        ({"query": "a", "documents": [{"txt": "b"}]}, "documents.0.text"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b", "y" * 600]}, "documents.1"),
        ({"query": "a" * 600, "documents": ["b"]}, "query"),
    ],
    ids=str,
)
async def test_rerank_bad_parameter_is_named(
    encoder: Served, fields: dict[str, Any], param: str
) -> None:
    status, named, *_ = await refusal(encoder, "/v1/rerank", **fields)
    assert (status, named) == (400, param)
    assert not encoder.engine.texts
