"""/ui/api/lens around a FakeEngine: what is sent to the engine, and what is shown of its answer."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from engine.errors import EngineDeadError
from engine.protocol.lens import (
    AttentionWeights,
    HeadSummaries,
    LensRequest,
    LensResult,
    NormSizes,
    Prediction,
    Update,
)
from engine.protocol.ready import Ready
from server.glassbox.lens import captures as desk
from server.glassbox.lens import text as lens_text
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, eventually, serving

UI = {"x-penstock-ui": "1"}
TOKENS = list(range(40, 85))  # 45 bytes, so that thumbnails are smaller than maps
HEADS, WINDOW, CAP = 3, 7, 5.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "INTERVAL", 0.0)


def random_map(queries: int, keys: int, window: int | None, seed: int) -> Any:
    """Return random weights [HEADS, queries, keys]; with `window`, of a causal layer."""
    weights = np.random.default_rng(seed).random((HEADS, queries, keys)) ** 8
    if window is not None:
        back = np.arange(queries)[:, None] - np.arange(keys)
        weights[:, (back < 0) | (back >= window)] = 0
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


MAPS = [random_map(45, 45, window, seed) for seed, window in enumerate((45, WINDOW))]
SCORES = [10 * np.random.default_rng(9 + n).standard_normal((HEADS, 45, 45)) for n in range(2)]
CROSS = random_map(45, 5, None, 8)


def packed(values: Any) -> bytes:
    """Return the lower triangles of maps."""
    return values[:, np.tri(values.shape[1], dtype=bool)].astype("<f4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def layer(stack: Any, number: int, maps: Any, *rest: Any) -> AttentionWeights:
    """A layer whose summary has one cell for each head."""
    heads, queries, keys = maps.shape
    numbers = tuple(float(head) for head in range(heads))
    thumbs = bytes(range(heads))
    summary = HeadSummaries(1, 1, thumbs, numbers, numbers, numbers[::-1], ())
    found = AttentionWeights(stack, number, heads, queries, keys, *rest)
    return msgspec.structs.replace(found, summary=summary)


def scripted(request: LensRequest) -> LensResult:
    if request.embeddings:
        size = len(request.tokens)
        return LensResult(request.id, cosines=np.eye(size, dtype="<f4").tobytes())
    attention = [
        layer("decoder", 0, MAPS[0], packed(MAPS[0]), None, CAP, packed(SCORES[0])),
        layer("decoder", 1, MAPS[1], packed(MAPS[1]), WINDOW, CAP, packed(SCORES[1])),
        layer("cross", 0, CROSS, CROSS.tobytes()),
    ]
    if request.layers is not None:
        attention = [
            one if place in request.layers else msgspec.structs.replace(one, weights=b"")
            for place, one in zip((0, 1, 0), attention, strict=True)
        ]
    found = Prediction(2, 0, 1.5, ((66, 0.75), (256, 0.25)), (0.125, 3))
    return LensResult(
        request.id,
        attention=attention if request.attention else [],
        updates=[Update("decoder", 0, "attention", 0.25, float("nan"), floats(0.5, 1))],
        norms=[NormSizes("decoder", "blocks.0.norm", floats(1, 2), floats(3, 4))],
        predictions=[found, msgspec.structs.replace(found, position=1, actual=None)],
        logit_lens=[msgspec.structs.replace(found, layer=0)] if request.positions else [],
    )


@pytest.fixture
async def lensed(model: Path, says: Any) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello"), lens=scripted), model) as running:
        yield running


async def post(served: Served, body: Any, path: str = "", key: str = "") -> httpx2.Response:
    headers = {**UI, **({"authorization": f"Bearer {key}"} if key else {})}
    return await served.http.post(f"/ui/api/lens{path}", json=body, headers=headers)


async def get(served: Served, path: str, key: str = "") -> httpx2.Response:
    headers = {**UI, **({"authorization": f"Bearer {key}"} if key else {})}
    return await served.http.get(f"/ui/api/lens/{path}", headers=headers)


async def refusal(response: httpx2.Response, status: int) -> tuple[str, str | None]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["code"], error["param"]


async def test_lens_returns_what_the_engine_found(lensed: Served) -> None:
    answer = await post(lensed, {"ids": TOKENS, "logit": {"positions": [3, 0, 3], "k": 7}})
    assert answer.status_code == 200
    report = answer.json()
    (sent,) = lensed.engine.looks
    assert (sent.tokens, sent.source, sent.positions, sent.top) == (TOKENS, [], (0, 3), 7)
    assert sent.attention
    assert report["tokens"] == TOKENS
    assert report["pieces"] == {**{str(t): chr(t + 33) for t in TOKENS}, "66": "c", "256": "<s>"}
    assert report["residual"] == [
        {
            "stack": "decoder",
            "updates": [
                {
                    "layer": 0,
                    "kind": "attention",
                    "scale": 0.25,
                    "scale_after_first": None,
                    "scales": [0.5, 1.0],
                }
            ],
            "norms": [{"name": "blocks.0.norm", "before": [1.0, 2.0], "after": [3.0, 4.0]}],
        }
    ]
    top = [[66, 0.75], [256, 0.25]]
    assert report["predictions"] == [
        {"position": 0, "entropy": 1.5, "top": top, "actual": {"p": 0.125, "rank": 3}},
        {"position": 1, "entropy": 1.5, "top": top, "actual": None},
    ]
    assert report["logit"] == [[0, 0, 1.5, top]]


async def test_report_has_the_summary_of_each_head(lensed: Served) -> None:
    found = (await post(lensed, {"ids": TOKENS})).json()["attention"]
    decoder, cross = found["decoder"], found["cross"]
    assert (decoder["layers"], decoder["heads"]) == (2, HEADS)
    assert (decoder["windows"], decoder["softcap"]) == ([None, WINDOW], CAP)
    assert (decoder["kept"], cross["kept"]) == ([0, 1], [0])
    assert (decoder["thumb_rows"], decoder["thumb_columns"]) == (1, 1)
    assert base64.b64decode(decoder["thumbs"]) == bytes(range(HEADS)) * 2
    assert decoder["flatness"] == decoder["previous"] == [[0.0, 1.0, 2.0]] * 2
    assert decoder["first"] == [[2.0, 1.0, 0.0]] * 2
    assert decoder["induction"] == [[], []]


async def test_weights_of_some_layers_are_kept_on_request(lensed: Served) -> None:
    report = (await post(lensed, {"ids": TOKENS, "layers": [1, 1], "want": ["thumbs"]})).json()
    (sent,) = lensed.engine.looks
    assert (sent.layers, sent.predictions) == ((1,), False)
    assert report["attention"]["decoder"]["kept"] == [1]
    capture = report["capture"]
    assert (await get(lensed, f"{capture}/1/0")).status_code == 200
    assert await refusal(await get(lensed, f"{capture}/0/0"), 404) == ("not_kept", None)


async def test_attention_is_a_numpy_file(lensed: Served) -> None:
    body = {"ids": TOKENS, "stack": "decoder"}
    for layers, expected in ((None, MAPS), ([1], MAPS[1:])):
        answer = await post(lensed, body | {"layers": layers}, "/attention")
        found = np.load(io.BytesIO(answer.content))
        assert found.dtype == np.float32
        assert np.array_equal(found, np.stack(expected))
    default = await post(lensed, {"ids": TOKENS}, "/attention")
    assert np.array_equal(np.load(io.BytesIO(default.content)), CROSS[None])
    assert not lensed.app.state.glassbox.lens._captures


@pytest.mark.parametrize(
    ("more", "param"), [({"layers": [2]}, "layers"), ({"stack": "encoder"}, "stack")], ids=str
)
async def test_attention_of_unknown_parts_is_refused(
    lensed: Served, more: dict[str, Any], param: str
) -> None:
    answer = await post(lensed, {"ids": TOKENS, "stack": "decoder"} | more, "/attention")
    assert await refusal(answer, 400) == ("invalid_value", param)


async def test_weights_that_are_too_large_are_refused(lensed: Served) -> None:
    lensed.engine.lens = lambda request: LensResult(request.id, error="large")
    for path in ("", "/attention"):
        answer = await post(lensed, {"ids": TOKENS, "layers": [0]}, path)
        assert await refusal(answer, 400) == ("invalid_value", "layers")


async def test_head_is_bytes_and_a_row_is_exact(lensed: Served) -> None:
    capture = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    for layer, head in ((0, 0), (1, 2)):
        whole = await get(lensed, f"{capture}/{layer}/{head}")
        assert whole.headers["content-type"] == "application/octet-stream"
        expected = np.rint(255 * np.sqrt(MAPS[layer][head]))
        assert np.array_equal(np.frombuffer(whole.content, np.uint8).reshape(45, 45), expected)
        for row in (0, 1, 17, 44):
            exact = (await get(lensed, f"{capture}/{layer}/{head}?row={row}")).json()
            assert exact["weights"] == MAPS[layer][head, row, : row + 1].tolist()
            scores = SCORES[layer][head, row, : row + 1]
            assert exact["scores"] == pytest.approx(scores, abs=1e-5)
            assert exact["capped"] == pytest.approx(CAP * np.tanh(scores / CAP), abs=1e-5)
    cross = await get(lensed, f"{capture}/0/1?stack=cross")
    expected = np.rint(255 * np.sqrt(CROSS[1]))
    assert np.array_equal(np.frombuffer(cross.content, np.uint8).reshape(45, 5), expected)
    exact = (await get(lensed, f"{capture}/0/1?stack=cross&row=44")).json()
    assert exact == {"weights": CROSS[1, 44].tolist()}


@pytest.mark.parametrize(
    ("place", "param"),
    [
        ("2/0", "layer"),
        ("-1/0", "layer"),
        ("0/3", "head"),
        ("x/0", "layer"),
        (f"0/{'9' * 5000}", "head"),
        ("0/0?row=45", "row"),
        ("0/0?row=0000000001", "row"),
        ("0/0?row=-1", "row"),
        ("0/0?row=²", "row"),
        ("0/0?row=", "row"),
        (f"0/0?row={'9' * 5000}", "row"),
        ("0/0?stack=encoder", "stack"),
        ("1/0?stack=cross", "layer"),
    ],
)
async def test_head_that_does_not_exist_is_refused(lensed: Served, place: str, param: str) -> None:
    capture = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    assert await refusal(await get(lensed, f"{capture}/{place}"), 400) == ("invalid_value", param)


async def test_mean_is_that_of_all_heads(lensed: Served) -> None:
    capture = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    whole = await get(lensed, f"{capture}/1/mean")
    expected = np.rint(255 * np.sqrt(MAPS[1].mean(0)))
    assert np.abs(np.frombuffer(whole.content, np.uint8).reshape(45, 45) - expected).max() <= 1
    row = (await get(lensed, f"{capture}/1/mean?row=30")).json()
    assert row.keys() == {"weights"}, "scores of several heads have no mean"
    assert row["weights"] == pytest.approx(MAPS[1][:, 30, :31].mean(0).tolist(), abs=1e-6)
    assert sum(row["weights"]) == pytest.approx(1.0, abs=1e-5)


async def test_images_of_a_text_model_are_refused(lensed: Served) -> None:
    body = {"ids": TOKENS, "images": ["data:image/png;base64,iVBORw0KGgo="]}
    assert await refusal(await post(lensed, body), 400) == ("unsupported_parameter", "images")
    assert (await post(lensed, {"ids": TOKENS})).json()["images"] == []


async def test_text_becomes_tokens_with_bos(lensed: Served, encode: Any) -> None:
    assert (await post(lensed, {"text": "Hi"})).json()["tokens"] == [256, *encode("Hi")]


@pytest.mark.parametrize(("path", "body"), [("", {"text": "Hi"}), ("/embeddings", {"ids": [1, 2]})])
async def test_lens_with_several_ranks_is_refused(
    lensed: Served, path: str, body: dict[str, Any]
) -> None:
    lensed.engine.info = msgspec.structs.replace(INFO, other_ranks=((),))
    refused = await post(lensed, body, path)
    assert await refusal(refused, 400) == ("lens_unavailable", None)
    assert "--tensor-parallel-size 2" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "ids"),
        ({"ids": []}, "invalid_value", "ids"),
        ({"ids": [1] * 101}, "context_length_exceeded", "ids"),
        ({"ids": [1] * 2049}, "invalid_value", "ids"),
        ({"text": "x" * 100}, "context_length_exceeded", "ids"),
        ({"ids": [258]}, "invalid_value", "ids"),
        ({"ids": [1], "text": "x"}, "invalid_value", "ids"),
        ({"ids": [-1]}, "invalid_value", "ids.0"),
        ({"ids": [1], "source": "x"}, "invalid_value", "source"),
        ({"ids": [1], "want": ["all"]}, "invalid_value", "want.0"),
        ({"ids": [1], "logit": {"positions": [1]}}, "invalid_value", "logit.positions"),
        ({"ids": [1], "logit": {"positions": [0] * 65}}, "invalid_value", "logit.positions"),
        ({"ids": [1], "logit": {"positions": [0], "k": 21}}, "invalid_value", "logit.k"),
    ],
    ids=str,
)
async def test_lens_of_a_wrong_body_is_refused(
    lensed: Served, body: Any, code: str, param: str
) -> None:
    assert await refusal(await post(lensed, body), 400) == (code, param)
    assert not lensed.engine.looks


async def test_lens_without_thumbs_keeps_no_capture(lensed: Served) -> None:
    first = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    report = (await post(lensed, {"ids": TOKENS, "want": ["predictions"]})).json()
    assert report["capture"] is None
    assert not lensed.engine.looks[1].attention
    assert "attention" not in report
    assert "residual" not in report
    assert (await get(lensed, f"{first}/0/0")).status_code == 200


async def test_capture_is_replaced_by_the_next_and_gone_after_its_time(
    lensed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    monkeypatch.setattr(desk, "LIFE", 0.2)
    second = (await post(lensed, {"ids": TOKENS})).json()["capture"]
    assert await refusal(await get(lensed, f"{first}/0/0"), 404) == ("not_found", None)
    assert (await get(lensed, f"{second}/0/0")).status_code == 200
    await asyncio.sleep(0.25)
    assert (await get(lensed, f"{second}/0/0")).status_code == 404
    assert not lensed.app.state.glassbox.lens._captures


@pytest.fixture
async def shared(model: Path, says: Any, tmp_path: Path) -> AsyncIterator[Served]:
    """A server with two plain keys and an admin key."""
    (tmp_path / "users").write_text("alice\nbob\n")
    (tmp_path / "admins").write_text("root\n")
    files = {"api_key_file": str(tmp_path / "users"), "admin_key_file": str(tmp_path / "admins")}
    async with serving(FakeEngine(says("Hello"), lens=scripted), model, **files) as served:
        yield served


async def test_tokens_of_a_lens_count_for_its_key(model: Path, says: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one tokens_per_minute=100\ntwo\n")
    keys = {"api_key_file": str(tmp_path / "keys")}
    async with serving(FakeEngine(says("Hello"), lens=scripted), model, **keys) as served:
        statuses = [(await post(served, {"ids": TOKENS}, key="one")).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert (await post(served, {"ids": TOKENS}, key="two")).status_code == 200


async def test_capture_is_that_of_its_key_only(shared: Served) -> None:
    assert (await post(shared, {"ids": TOKENS})).status_code == 401
    captures = {
        key: (await post(shared, {"ids": TOKENS}, key=key)).json()["capture"]
        for key in ("alice", "bob")
    }
    for key in ("alice", "bob", "root"):
        for owner, capture in captures.items():
            status = (await get(shared, f"{capture}/0/0", key)).status_code
            assert status == (200 if key == owner else 404)


async def test_captures_of_all_keys_together_are_bounded(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "MAX_LENS_BYTES", 100_000)
    alice = (await post(shared, {"ids": TOKENS}, key="alice")).json()["capture"]
    bob = (await post(shared, {"ids": TOKENS}, key="bob")).json()["capture"]
    assert (await get(shared, f"{alice}/0/0", "alice")).status_code == 404
    assert (await get(shared, f"{bob}/0/0", "bob")).status_code == 200


async def test_lenses_start_one_interval_apart(
    lensed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "INTERVAL", 0.3)
    begun = time.monotonic()
    answers = await asyncio.gather(*(post(lensed, {"ids": [1, 2]}) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert 0.6 <= time.monotonic() - begun < 3
    begun = time.monotonic()
    await post(lensed, {"ids": [1]}, "/embeddings")
    assert time.monotonic() - begun < 0.3, "embeddings do not wait"


async def test_lens_that_waits_too_long_for_others_is_busy(
    lensed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "MAX_LENS_WAIT", 0.1)
    lensed.engine.lens_gate.clear()
    first = asyncio.create_task(post(lensed, {"ids": [1]}))
    await eventually(lambda: bool(lensed.engine.looks), "the first lens is sent")
    refused = await post(lensed, {"ids": [2]})
    assert await refusal(refused, 503) == ("busy", None)
    assert refused.headers["retry-after"] == "5"
    lensed.engine.lens_gate.set()
    assert (await first).status_code == 200
    assert (await post(lensed, {"ids": [3]})).status_code == 200
    assert [look.tokens for look in lensed.engine.looks] == [[1], [3]]


@pytest.mark.parametrize(
    ("error", "status", "code"), [("busy", 503, "busy"), ("failed", 500, "lens_failed")]
)
async def test_lens_that_the_engine_refuses_is_an_error(
    lensed: Served, error: Any, status: int, code: str
) -> None:
    lensed.engine.lens = lambda request: LensResult(request.id, error=error)
    assert await refusal(await post(lensed, {"ids": [1]}), status) == (code, None)
    lensed.engine.lens = scripted
    assert (await post(lensed, {"ids": [1]})).status_code == 200


async def test_lens_without_an_engine_is_an_error(lensed: Served) -> None:
    lensed.engine.death = EngineDeadError("gone")
    assert (await post(lensed, {"ids": [1]})).status_code == 503


async def test_translation_has_a_source_and_a_start_token(model: Path, says: Any) -> None:
    info = msgspec.structs.replace(INFO, kind="encoder-decoder", start_token=7)
    assert isinstance(info, Ready)
    engine = FakeEngine(says("Hello"), lens=scripted, info=info)
    async with serving(engine, model) as served:
        body = {"source_ids": [1, 2], "ids": [3]}
        assert (await post(served, body)).status_code == 200
        assert (await post(served, {"source": "a"})).status_code == 200
        assert (await post(served, {"source": "a", "text": "b"})).status_code == 200
        sent = [(look.source, look.tokens) for look in engine.looks]
        assert sent == [([1, 2], [7, 3]), ([256, 64], [7]), ([256, 64], [7, 65])]
        assert await refusal(await post(served, {"ids": [3]}), 400) == (
            "invalid_value",
            "source_ids",
        )
        for doubled in ({"source": "a", "ids": [3]}, {"source_ids": [1], "ids": [3], "text": "b"}):
            both = {"source_ids": [1], **doubled}
            assert (await refusal(await post(served, both), 400))[0] == "invalid_value"


async def test_embeddings_return_cosines_and_texts(lensed: Served) -> None:
    answer = await post(lensed, {"ids": [40, 256]}, "/embeddings")
    assert answer.json() == {"cosine": [[1.0, 0.0], [0.0, 1.0]], "texts": ["I", "<s>"]}
    for ids in ([], [1] * 33, [258]):
        refused = await post(lensed, {"ids": ids}, "/embeddings")
        assert await refusal(refused, 400) == ("invalid_value", "ids")


async def test_lens_needs_the_header_of_the_pages(lensed: Served) -> None:
    for method, path in (("POST", ""), ("POST", "/embeddings"), ("GET", "/x/0/0")):
        response = await lensed.http.request(method, f"/ui/api/lens{path}", json={"ids": [1]})
        assert response.status_code == 403


async def test_lens_whose_client_leaves_is_cancelled_and_gives_its_turn_back(
    lensed: Served,
) -> None:
    lensed.engine.lens_gate.clear()
    first = asyncio.create_task(post(lensed, {"ids": [1]}))
    await eventually(lambda: bool(lensed.engine.looks), "the first lens is sent")
    second = asyncio.create_task(post(lensed, {"ids": [2]}))
    await asyncio.sleep(0.05)
    for task in (first, second):
        task.cancel()
    third = asyncio.create_task(post(lensed, {"ids": [3]}))
    await eventually(lambda: len(lensed.engine.looks) == 2, "the third lens is sent")
    lensed.engine.lens_gate.set()
    assert (await third).status_code == 200
    assert [look.tokens for look in lensed.engine.looks] == [[1], [3]]


async def test_replaced_capture_takes_no_memory() -> None:
    lenses = desk.LensDesk()
    weights = b"\0" * 4096
    held = sys.getrefcount(weights)
    for _ in range(3):
        lenses.keep("alice", [AttentionWeights("decoder", 0, 1, 1, 1, weights)])
    assert sys.getrefcount(weights) == held + 1
    lenses.keep("alice", [AttentionWeights("decoder", 0, 1, 1, 1, b"")])
    assert sys.getrefcount(weights) == held


async def test_unknown_fields_and_another_model_are_refused(lensed: Served) -> None:
    for path in ("", "/embeddings", "/attention"):
        unknown = await post(lensed, {"ids": [1], "top": 3}, path)
        assert await refusal(unknown, 400) == ("unsupported_parameter", "top")
        refused = await post(lensed, {"ids": [1], "model": "other"}, path)
        assert await refusal(refused, 404) == ("model_not_found", "model")


async def test_unknown_field_of_the_logit_lens_is_refused(lensed: Served) -> None:
    unknown = await post(lensed, {"ids": [1], "logit": {"positions": [0], "top": 3}})
    assert await refusal(unknown, 400) == ("unsupported_parameter", "logit.top")
    assert not lensed.engine.looks


async def test_long_text_is_tokenised_off_the_event_loop(
    lensed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode = lens_text.encode_prompt

    def noting(*args: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args, **options)

    monkeypatch.setattr(lens_text, "encode_prompt", noting)
    refused = await post(lensed, {"text": "x" * 20_000})
    assert await refusal(refused, 400) == ("context_length_exceeded", "ids")
    assert threads != [threading.main_thread()]


async def test_encoder_has_no_logit_lens(model: Path, says: Any) -> None:
    info = msgspec.structs.replace(INFO, kind="encoder")
    async with serving(FakeEngine(says("Hello"), lens=scripted, info=info), model) as served:
        refused = await post(served, {"ids": [1], "logit": {"positions": [0]}})
        assert await refusal(refused, 400) == ("invalid_value", "logit")


async def test_get_of_a_route_for_post_names_the_method(lensed: Served) -> None:
    for path in ("explain", "lens", "lens/embeddings", "prompt"):
        response = await lensed.http.get(f"/ui/api/{path}", headers=UI)
        assert (response.status_code, response.headers.get("allow")) == (405, "POST"), path
