"""Number formats of vectors: torch's conversions are the reference."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from server.api.openai.number_formats import Endianness, NumberFormat, vector_bytes
from tests.server.conftest import BOS
from tests.support.fake_encoder import FakeEncoder, vector
from tests.support.rig import Served, serving

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def numbers() -> np.ndarray:
    """Return numbers of all sizes, ties between two numbers of a format, zeros and signs."""
    random = np.random.default_rng(0)
    sizes = 2.0 ** random.uniform(-20, 8, 4000)
    eighths = np.arange(0, 256) / 128  # has the ties of both formats of 8 bits
    found = np.concatenate([sizes, eighths, eighths / 64, [0.0, 448.0, 2.0**-10]])
    return np.concatenate([found, -found]).astype("<f4")


@pytest.mark.parametrize("number_format", get_args(NumberFormat))
def test_vector_bytes_round_as_torch_does(number_format: NumberFormat) -> None:
    given = numbers()
    wanted = torch.from_numpy(given).to(DTYPES[number_format]).view(torch.uint8).numpy().tobytes()
    assert vector_bytes(given, number_format, "native") == wanted
    assert vector_bytes(given, number_format, "little") == wanted
    width = WIDTHS[number_format]
    swapped = np.frombuffer(wanted, np.uint8).reshape(-1, width)[:, ::-1].tobytes()
    assert vector_bytes(given, number_format, "big") == swapped


def test_vector_bytes_of_large_numbers_are_the_largest() -> None:
    given = np.array([1e9, -1e9], "<f4")
    assert vector_bytes(given, "fp8_e4m3", "native") == bytes([0x7E, 0xFE])
    assert vector_bytes(given, "fp8_e5m2", "native") == bytes([0x7B, 0xFB])


@pytest.fixture
async def encoder(model: Path) -> AsyncIterator[Served]:
    async with serving(FakeEncoder(lambda request: []), model) as running:
        yield running


@pytest.mark.parametrize("endianness", get_args(Endianness))
async def test_embeddings_as_bytes_are_those_of_base64(encoder: Served, endianness: str) -> None:
    async def post(form: str) -> Any:
        fields = {"embed_dtype": "float16", "endianness": endianness, "encoding_format": form}
        return await encoder.http.post("/v1/embeddings", json={"input": ["a", "b"], **fields})

    texts = [entry["embedding"] for entry in (await post("base64")).json()["data"]]
    joined = b"".join([base64.b64decode(text) for text in texts])
    order = ">f2" if endianness == "big" else "<f2"
    expected = np.array([vector([BOS, 64]), vector([BOS, 65])]).astype(order).tobytes()
    assert joined == expected
    response = await post("bytes_only")
    assert response.content == joined
    assert "metadata" not in response.headers
    response = await post("bytes")
    assert (response.content, response.headers["content-type"]) == (
        joined,
        "application/octet-stream",
    )
    places = json.loads(response.headers["metadata"])["data"]
    assert [(place["start"], place["end"]) for place in places] == [(0, 8), (8, 16)]
    assert {place["embed_dtype"] for place in places} == {"float16"}
    assert places[0]["shape"] == [4]


async def test_embeddings_as_bytes_with_a_header_are_few(encoder: Served) -> None:
    body = {"input": ["a"] * 257, "encoding_format": "bytes"}
    response = await encoder.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "encoding_format")


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_embeddings_are_normalised_if_the_request_says_so(encoder: Served, name: str) -> None:
    async def first(**fields: Any) -> Any:
        body = (await encoder.http.post("/v1/embeddings", json={"input": "a", **fields})).json()
        return body["data"][0]["embedding"]

    raw = vector([BOS, 64])
    assert await first() == raw.tolist()
    assert await first(**{name: False}) == raw.tolist()
    unit = await first(**{name: True})
    assert unit == pytest.approx((raw / np.linalg.norm(raw)).tolist(), abs=1e-6)
