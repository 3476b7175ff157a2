"""Networks that slice responses into bytes, reset connections, or close one direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from tests.server.generation.test_disconnect import request
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import Proxy, proxied
from tests.support.rig import Served, eventually, serving

USER = {"role": "user", "content": "Hi"}
TEXT = "Zoë said: 🌍 is “round”.\n\n\u2028data: [DONE]\n"  # hard for careless parsers


@pytest.fixture
async def talking(model, says) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says(TEXT), delay=0.002), model) as served:
        yield served


def client(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{proxy.port}/v1",
        api_key="-",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


@pytest.mark.variants(1)
@pytest.mark.parametrize("size", [1, 2, 7])
async def test_openai_client_reads_sliced_responses(talking, size):
    async with proxied(talking.address, slice_bytes=size) as proxy, client(proxy) as sdk:
        fields = {"model": "tiny", "messages": [USER], "n": 2}
        whole = await sdk.chat.completions.create(**fields)
        assert [choice.message.content for choice in whole.choices] == [TEXT] * 2
        texts = ["", ""]
        async for chunk in await sdk.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [TEXT] * 2
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.chat.completions.create(**fields, temperature=3)
        assert refused.value.param == "temperature"


@pytest.mark.parametrize("most", [0, 20, 300, 700, 1500])
async def test_connection_reset_raises_in_client_and_aborts_in_server(talking, encode, most):
    talking.engine.script = lambda r: encode("again and ")
    async with proxied(talking.address, slice_bytes=10, most=most) as proxy, client(proxy) as sdk:
        with pytest.raises((openai.APIConnectionError, httpx2.TransportError)):  # noqa: PT012
            stream = await sdk.chat.completions.create(
                model="tiny", messages=[USER], stream=True, max_tokens=400
            )
            async for _ in stream:
                pass
    await eventually(lambda: not talking.engine.running, "it is aborted")
    assert len(talking.engine.aborted) == 1
    assert await talking.metric("aborts_total", reason="disconnect") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_half_close_aborts_request(talking, stream):
    """While nothing is sent, a FIN is the only sign that a client has left.

    The server cannot know whether the client would still read.
    """
    talking.engine.gate.clear()
    reader, writer = await asyncio.open_connection(*talking.address)
    writer.write(request(stream=stream))
    await eventually(lambda: bool(talking.engine.running), "the request runs")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    await eventually(lambda: len(talking.engine.aborted) == 1, "it is aborted")
    writer.close()
    talking.engine.gate.set()
    assert (await talking.complete()).status_code == 200
