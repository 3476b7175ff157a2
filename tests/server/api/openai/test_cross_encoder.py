"""The routes of scores and labels with a scripted model that has a head."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tests.server.conftest import BOS, EOS
from tests.support.fake_encoder import BROKEN, FakeEncoder, vector
from tests.support.rig import Served, serving

LONGEST = 40
NAMES = {"0": "no", "1": "perhaps", "2": "yes"}
RERANK = "/v1/rerank"


def ids(text: str) -> list[int]:
    """Return the ids that the byte tokenizer gives for ASCII letters."""
    return [ord(char) - 33 for char in text]


def pair(first: str, second: str) -> list[int]:
    return [BOS, *ids(first), EOS, *ids(second), EOS]


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokenizer joins pairs as BERT's does, and whose scores are logits."""
    folder = tmp_path_factory.mktemp("heads") / "one"
    shutil.copytree(model, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    limit = {"model_max_length": LONGEST, "chat_template": None}
    edit(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", **limit)
    edit(
        folder / "config.json",
        architectures=["BertForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        sbert_ce_default_activation_function="torch.nn.Identity",
    )
    return folder


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@asynccontextmanager
async def labelled(folder: Path, other: Path, labels: int, **config: Any) -> AsyncIterator[Served]:
    """Serve a copy of a folder with another number of labels, without an activation."""
    shutil.copytree(folder, other)
    names = {str(n): NAMES[str(n)] for n in range(labels)}
    edit(
        other / "config.json",
        id2label=names,
        sbert_ce_default_activation_function=None,
        **config,
    )
    async with serving(FakeEncoder(lambda request: [], labels=labels), other) as served:
        yield served


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: [], labels=1), folder) as running:
        yield running


async def post(served: Served, path: str, **body: Any) -> Any:
    served.engine.texts.clear()
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(served: Served, path: str, **body: Any) -> tuple[str, str]:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def sent(served: Served) -> list[list[int]]:
    return [text.tokens for text in served.engine.texts]


async def test_rerank_sends_each_document_with_the_query(served: Served) -> None:
    documents = ["ab", {"text": "abdefgh"}, "abde"]
    answer = await post(served, RERANK, query="xy", documents=documents, top_n=2)
    assert sent(served) == [pair("xy", text) for text in ("ab", "abdefgh", "abde")]
    assert {text.second for text in served.engine.texts} == {4}
    assert [entry["index"] for entry in answer["results"]] == [1, 2]
    assert [entry["relevance_score"] for entry in answer["results"]] == [12.0, 9.0]
    assert answer["results"][0]["document"] == {"text": "abdefgh"}
    assert answer["usage"]["total_tokens"] == 7 + 12 + 9


async def test_rerank_of_cohere_answers_in_its_form(served: Served) -> None:
    body = {"query": "xy", "documents": ["ab", {"text": "abdefgh"}, "abde"], "top_n": 2}
    answer = await post(served, "/v2/rerank", **body)
    assert answer["results"] == [
        {"index": 1, "relevance_score": 12.0},
        {"index": 2, "relevance_score": 9.0},
    ]
    assert answer["meta"]["api_version"] == {"version": "2"}
    long = {"query": "xy", "documents": ["a" * 90, "b"]}
    for path in ("/v2/rerank", RERANK):
        await post(served, path, **long, max_tokens_per_doc=3)
        assert sent(served) == [pair("xy", "aaa"), pair("xy", "b")]
    assert (await refusal(served, "/v2/rerank", **body, rank_fields=["text"]))[0] == "rank_fields"
    assert (await refusal(served, "/v2/rerank", **body | {"top_n": 0}))[0] == "top_n"


async def test_rerank_of_tei_gives_its_list_with_raw_scores(served: Served) -> None:
    body = {"query": "xy", "texts": ["ab", "abde"]}
    for raw in (True, False):
        answer = await post(served, "/rerank", **body, raw_scores=raw)
        assert answer == [{"index": 1, "score": 9.0}, {"index": 0, "score": 7.0}]


async def test_score_pairs_texts_one_with_many_and_each_with_its_own(served: Served) -> None:
    await post(served, "/v1/score", text_1="x", text_2=["ab", "d"])
    assert sent(served) == [pair("x", "ab"), pair("x", "d")]
    answer = await post(served, "/v1/score", text_1=["x", "yz"], text_2=["ab", "d"])
    assert sent(served) == [pair("x", "ab"), pair("yz", "d")]
    assert [text.second for text in served.engine.texts] == [3, 4]
    assert [entry["score"] for entry in answer["data"]] == [6.0, 6.0]


async def test_pair_that_is_too_long_is_refused_or_cut_on_request(served: Served) -> None:
    body = {"query": "q" * 30, "documents": ["a", "d" * 30]}
    param, message = await refusal(served, RERANK, **body)
    assert param == "documents.1"
    assert f"{LONGEST} tokens" in message
    assert "63" in message
    assert (await refusal(served, RERANK, query="q", documents=["d" * 90_000]))[0] == "documents"
    await post(served, RERANK, **body, truncate_prompt_tokens=-1)
    assert sent(served) == [pair("q" * 30, "a"), pair("q" * 18, "d" * 19)]
    await post(served, RERANK, **body, truncate_prompt_tokens=16)
    assert sent(served) == [pair("q" * 12, "a"), pair("q" * 6, "d" * 7)]
    cut = {"truncate_prompt_tokens": 9, "truncation_side": "left"}
    await post(served, RERANK, query="qrstuvw", documents=["abdefgh"], **cut)
    assert sent(served) == [pair("uvw", "fgh")]
    for most in (3, LONGEST + 1):
        refused = await refusal(served, RERANK, **body, truncate_prompt_tokens=most)
        assert refused[0] == "truncate_prompt_tokens"


async def test_pair_of_a_chat_template_takes_limits_that_cut_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """Some clients always send a limit, such as Haystack's 4,096 tokens for each document."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    template = "{{ messages[0].content }}|{{ messages[1].content }}"
    edit(other / "tokenizer_config.json", chat_template=template)
    body = {"query": "xy", "documents": ["ab", "abde"]}
    whole = [ids("xy|ab"), ids("xy|abde")]
    async with serving(FakeEncoder(lambda request: [], labels=1), other) as served:
        for path, limit in (
            ("/v2/rerank", {"max_tokens_per_doc": 4096}),
            ("/v2/rerank", {"max_tokens_per_doc": 4}),
            (RERANK, {"truncate_prompt_tokens": -1}),
            (RERANK, {"truncate_prompt_tokens": 7}),
            (RERANK, {"truncate": True}),
        ):
            await post(served, path, **body, **limit)
            assert sent(served) == whole
        for path, name, most in (
            ("/v2/rerank", "max_tokens_per_doc", 3),
            (RERANK, "truncate_prompt_tokens", 6),
        ):
            param, message = await refusal(served, path, **body, **{name: most})
            assert param == name
            assert f"are not cut: {most + 1} tokens to {most}" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RERANK, {"query": "", "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": ["a", ""]}, "documents.1"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": [{"title": "a"}]}, "documents.0.text"),
        ("/v2/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/v2/rerank", {"query": "a"}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_2"),
        ("/v1/classify", {"input": ""}, "input"),
        ("/v1/classify", {}, "input"),
        ("/v1/classify", {"text_1": "a"}, "text_2"),
        ("/v1/classify", {"text_2": "a"}, "text_1"),
        ("/v1/classify", {"input": "a", "text_2": "a"}, "input"),
        ("/v1/classify", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_2"),
        (
            "/v1/classify",
            {"text_1": "a", "text_2": "a", "add_special_tokens": False},
            "add_special_tokens",
        ),
        (
            "/rerank",
            {"query": "a", "texts": ["a"], "raw_scores": True, "use_activation": True},
            "raw_scores",
        ),
    ],
)
async def test_invalid_bodies_are_refused_by_the_name_of_the_field(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await refusal(served, path, **body))[0] == param


async def test_as_many_documents_as_allowed_are_scored(served: Served) -> None:
    answer = await post(served, RERANK, query="a", documents=["b"] * 2048, return_documents=False)
    assert len(answer["results"]) == 2048


async def test_score_that_is_not_finite_is_an_error(served: Served) -> None:
    body = {"query": "a", "documents": ["a", chr(BROKEN + 33)]}
    assert (await served.http.post(RERANK, json=body)).status_code == 500


async def test_prompt_precedes_the_query_alone(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    kind = "sentence_transformers.models.Transformer"
    (other / "modules.json").write_text(json.dumps([{"type": kind, "path": ""}]))
    settings = {
        "model_type": "CrossEncoder",
        "prompts": {"ask": "q:"},
        "default_prompt_name": "ask",
    }
    (other / "config_sentence_transformers.json").write_text(json.dumps(settings))
    async with serving(FakeEncoder(lambda request: [], labels=1), other) as served:
        await post(served, RERANK, query="x", documents=["a"])
        assert sent(served) == [pair("q:x", "a")]
        await post(served, "/v1/classify", input="x")
        assert sent(served) == [[BOS, *ids("x"), EOS]]


async def test_classify_gives_probabilities_and_the_names_of_labels(
    folder: Path, tmp_path: Path
) -> None:
    async with labelled(folder, tmp_path / "other", 3) as served:
        texts = ["ab", ids("abd")]
        answer = await post(served, "/v1/classify", input=texts)
        raw = await post(served, "/classify", input=texts, use_activation=False)
        logits = np.array([vector(tokens)[:3] for tokens in sent(served)], dtype=np.float64)
        assert sent(served) == [[BOS, *ids("ab"), EOS], ids("abd")]
        powers = np.exp(logits - logits.max(1, keepdims=True))
        due = powers / powers.sum(1, keepdims=True)
        for entry, number, probs in zip(answer["data"], (0, 1), due, strict=True):
            assert entry["probs"] == pytest.approx(probs, abs=1e-6)
            assert entry["label"] == NAMES[str(probs.argmax())]
            assert (entry["index"], entry["num_classes"]) == (number, 3)
        assert [entry["probs"] for entry in raw["data"]] == logits.tolist()
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        pairs = await post(served, "/v1/classify", text_1="x", text_2=["y", "de"])
        assert sent(served) == [pair("x", "y"), pair("x", "de")]
        assert [entry["num_classes"] for entry in pairs["data"]] == [3, 3]


async def test_classify_several_right_labels_have_their_own_probabilities(
    folder: Path, tmp_path: Path
) -> None:
    config = {"problem_type": "multi_label_classification"}
    async with labelled(folder, tmp_path / "other", 2, **config) as served:
        answer = await post(served, "/v1/classify", input="\x22")
        logits = vector(sent(served)[0])[:2]
        probs = answer["data"][0]["probs"]
        assert probs == pytest.approx((1 / (1 + np.exp(-logits.astype(float)))).tolist(), abs=1e-6)


async def test_task_decides_which_routes_answer(
    folder: Path, tmp_path: Path, model: Path, served: Served
) -> None:
    card = (await served.http.get("/v1/models")).json()["data"][0]
    assert (card["task"], card["tasks"]) == ("score", ["score", "classify"])
    assert card["capabilities"] == ["rerank", "classification"]
    assert "embedding_size" not in card
    routes = (await served.http.get("/capabilities")).json()["routes"]
    found = {route["path"] for route in routes if route["task"] and route["available"]}
    scores = {"/v1/score", "/v1/rerank", "/v2/rerank"}
    labels = {"/v1/classify"}
    assert found == scores | labels
    param, message = await refusal(served, "/v1/embeddings", input="a")
    assert param == "model"
    assert "scores pairs of texts; use /v1/rerank" in message
    assert (await refusal(served, "/v1/chat/completions", messages=[]))[0] == "model"
    async with labelled(folder, tmp_path / "other", 3) as classifier:
        for path in sorted(scores):
            message = (await refusal(classifier, path))[1]
            assert "has 3 labels for a text; use /v1/classify" in message
    async with serving(FakeEncoder(lambda request: []), model) as encoder:
        routes = (await encoder.http.get("/capabilities")).json()["routes"]
        found = {route["path"] for route in routes if route["task"] and route["available"]}
        assert scores <= found
        assert not labels & found
        assert "makes embeddings" in (await refusal(encoder, "/v1/classify", input="a"))[1]
        for field in ({"use_activation": False}, {"raw_scores": True}):
            body = {"query": "a", "documents": ["a"], **field}
            assert [(await refusal(encoder, RERANK, **body))[0]] == list(field)
        body = {"query": "ab", "documents": ["a" * 90, "b"], "max_tokens_per_doc": 3}
        await post(encoder, "/v2/rerank", **body)
        assert sorted(map(len, sent(encoder))) == [2, 3, 4]


SCORES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rerank", {"query": "xy", "documents": ["ab", "abde"], "top_n": 1}),
    ("/rerank", {"query": "xy", "texts": ["ab", "abde"], "raw_scores": True}),
    ("/v1/score", {"text_1": "x", "text_2": ["ab", "d"], "use_activation": False}),
    ("/v1/score", {"queries": ["x", "y"], "items": ["ab", "d"]}),
    ("/v1/score", {"data_1": "x", "data_2": "ab"}),
]
LABELS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/classify", {"input": ["ab", "d"]}),
    ("/v1/classify", {"input": [[3, 4, 5]], "use_activation": False}),
]
PAIRS_OF_LABELS = ("/v1/classify", {"text_1": "x", "text_2": ["ab", "d"]})


async def check_invocations(served: Served, bodies: list[tuple[str, dict[str, Any]]]) -> None:
    for path, body in bodies:
        direct = await post(served, path, **body)
        texts = sent(served)
        found = await post(served, "/invocations", **body)
        assert sent(served) == texts
        for answer in (direct, found):
            if isinstance(answer, dict):
                assert answer.pop("id")
                answer.pop("created", None)
        assert found == direct


async def test_invocations_of_a_reranker_are_its_scores_and_labels(served: Served) -> None:
    await check_invocations(served, [*SCORES, *LABELS])


async def test_invocations_of_a_classifier_are_labels_of_texts_and_pairs(
    folder: Path, tmp_path: Path
) -> None:
    async with labelled(folder, tmp_path / "many", 3) as served:
        await check_invocations(served, [*LABELS, PAIRS_OF_LABELS])


async def test_invocations_that_the_model_cannot_answer_are_refused_by_name(
    served: Served, folder: Path, tmp_path: Path
) -> None:
    for body in ({"prompt": "a"}, {"messages": []}, {"input": "a", "task": "embed"}):
        param, message = await refusal(served, "/invocations", **body)
        assert (param, "scores pairs" in message) == ("model", True)
    for fields in ({}, {"text_2": "a"}, {"documents": ["a"]}, {"query": "a"}):
        param, message = await refusal(served, "/invocations", **fields)
        assert param is None
        assert "query with documents or texts; text_1" in message
    assert (await refusal(served, "/invocations", input="a", text_1="b"))[0] == "input"
    assert (await refusal(served, "/invocations", text_1="b"))[0] == "text_2"
    async with labelled(folder, tmp_path / "many", 3) as many:
        for _, body in SCORES[:2]:
            param, message = await refusal(many, "/invocations", **body)
            assert (param, "3 labels" in message) == ("model", True)
