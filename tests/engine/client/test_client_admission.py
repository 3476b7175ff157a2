"""Admission control in ProcessClient: queue limits, and what makes room in the queue."""

from __future__ import annotations

import math

import pytest

from engine.errors import EngineDeadError, EngineOverloadedError, EngineUnavailableError
from engine.protocol.embed import EmbedRequest
from engine.protocol.outputs import EngineStats, Rejected
from tests.support.client_rig import Client, read, token


async def test_submit_beyond_request_limit_is_refused(client: Client) -> None:
    for _ in range(3):
        client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError, match="3 requests with 3 prompt tokens"):
        client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError):
        client.admit()
    client.step(admitted=(2,))
    client.admit()


async def test_submit_beyond_token_limit_is_refused(client: Client) -> None:
    client.submit_prompts(60)
    client.offer(40)
    with pytest.raises(EngineOverloadedError):
        client.offer(41)
    client.step(admitted=(1,))
    client.offer(100)


async def test_submit_to_empty_queue_accepts_any_size(client: Client) -> None:
    _, ids = client.submit_prompts(70, 70, 70, 70)
    assert len(client.endpoint.sent) == 4
    with pytest.raises(EngineOverloadedError):
        client.admit()
    client.step(admitted=tuple(ids))
    client.submit_prompts(101)


async def test_submit_without_room_for_all_sends_none(client: Client) -> None:
    client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError):
        client.submit_prompts(1, 1, 1)
    assert len(client.endpoint.sent) == 1
    client.submit_prompts(1, 1)


async def test_embed_several_texts_count_as_one_request(client: Client) -> None:
    def embed(*lengths: int) -> list[int]:
        texts = [EmbedRequest(client.next_id(), [1] * n, 0.0) for n in lengths]
        client.embed(texts)
        return [text.id for text in texts]

    first, second = embed(10, 10, 10, 10), embed(5, 5)
    embed(5)
    with pytest.raises(EngineOverloadedError, match="3 requests with 55 prompt tokens"):
        client.admit()
    client.step(admitted=tuple(first[:3]))
    with pytest.raises(EngineOverloadedError, match="3 requests with 25 prompt tokens"):
        embed(1)
    client.step(admitted=(first[3],))
    with pytest.raises(EngineOverloadedError, match="2 requests with 15 prompt tokens"):
        embed(86)
    embed(40, 40)
    client.step(admitted=tuple(second))
    client.admit()


@pytest.mark.parametrize("leave", ["admitted", "aborted", "refused"])
async def test_queue_request_leaving_twice_makes_room_once(client: Client, leave: str) -> None:
    stream, (request_id,) = client.submit_prompts(90)
    client.submit_prompts(5)
    with pytest.raises(EngineOverloadedError):
        client.offer(6)
    for _ in range(2):
        if leave == "admitted":
            client.step(admitted=(request_id,))
        elif leave == "refused":
            client._on_message(Rejected(request_id, "invalid_value", "no"))
        else:
            stream.close()
        client.offer(95)
        with pytest.raises(EngineOverloadedError):
            client.offer(96)


@pytest.mark.parametrize(
    ("step_seconds", "tokens", "expected"), [(0.0, 64, 1), (0.5, 10, 5), (30.0, 1, 48)]
)
async def test_retry_after_follows_throughput_up_to_a_minute(
    client: Client, step_seconds: float, tokens: int, expected: int
) -> None:
    client.submit_prompts(100)
    client.step(stats=EngineStats(step_seconds=step_seconds, step_prefill_tokens=tokens))
    with pytest.raises(EngineOverloadedError) as refused:
        client.offer(1)
    assert expected <= refused.value.retry_after <= min(math.ceil(expected * 1.25), 60)


async def test_retry_after_of_simultaneous_refusals_is_spread(client: Client) -> None:
    client.submit_prompts(100)
    client.step(stats=EngineStats(step_seconds=30.0, step_prefill_tokens=1))
    told = set()
    for _ in range(50):
        with pytest.raises(EngineOverloadedError) as refused:
            client.offer(1)
        told.add(refused.value.retry_after)
    assert len(told) > 5


async def test_admit_unless_ready_is_refused_and_accepted_work_goes_on() -> None:
    client = Client()
    client.state = "loading"
    with pytest.raises(EngineUnavailableError) as refused:
        client.admit()
    assert refused.value.state == "loading"
    client.state = "ready"
    stream, (request_id,) = client.submit_prompts(1)
    client.drain()
    with pytest.raises(EngineUnavailableError) as refused:
        client.admit()
    assert refused.value.state == "draining"
    tokenised, (late,) = client.submit_prompts(1)  # passed `admit` before the drain
    client.step(token(request_id, 5, "stop"), admitted=(request_id,))
    client.step(token(late, 6, "stop"), admitted=(late,))
    assert await read(stream) == [[5]], "accepted requests must go on"
    assert await read(tokenised) == [[6]]
    client.die(-9)
    client.drain()
    with pytest.raises(EngineDeadError):
        client.admit()
