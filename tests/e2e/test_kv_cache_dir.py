"""`penstock serve --kv-cache-dir` over restarts: kills, damage, floods and small bounds.

Run: pytest -m slow tests/e2e/test_kv_cache_dir.py
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from server import exit_codes
from tests.support.damaged_blocks import block_files, damage
from tests.support.process import eventually
from tests.support.serve import Answer, Server, complete, serving, starting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BLOCK, PROMPT_TOKENS, NUM_PROMPTS = 16, 810, 20
FILES = PROMPT_TOKENS // BLOCK * NUM_PROMPTS
ALICE, BOB = "sk-alice", "sk-bob"


def prompts(seed: int, count: int = NUM_PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(300, 2000), k=PROMPT_TOKENS) for _ in range(count)]


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    return {**fields, "return_token_ids": True, "ignore_eos": True, **more}


async def answers(server: Server, given: list[list[int]], key: str = "") -> list[Answer]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with server.http(headers=headers) as http:
        return [await complete(http, body(prompt)) for prompt in given]


def flags(folder: Path, *more: object) -> tuple[object, ...]:
    return ("demo", "--kv-cache-dir", folder, "--block-size", BLOCK, *more)


def same(found: list[Answer], expected: list[Answer]) -> bool:
    """Whether tokens and the bits of their logprobs are equal."""
    pairs = zip(found, expected, strict=True)
    return all((a.ids, a.logprobs) == (b.ids, b.logprobs) for a, b in pairs)


def written(folder: Path, count: int) -> None:
    eventually(lambda: len(block_files(folder)) >= count, "the blocks are written", 60)


async def test_answers_after_stop_and_kill_are_equal_and_prompts_are_found(tmp_path: Path) -> None:
    given = prompts(1, 4)
    with serving(*flags(tmp_path)) as server:
        expected = await answers(server, given)
        written(tmp_path, 4 * (PROMPT_TOKENS // BLOCK))
    for end in (signal.SIGTERM, signal.SIGKILL):
        with serving(*flags(tmp_path)) as server:
            found = await answers(server, given)
            assert same(found, expected)
            assert [answer.cached for answer in found] == [800] * 4
            server.process.send_signal(end)
            server.process.wait(60)
    with serving(*flags(tmp_path)) as server:
        assert same(await answers(server, given), expected)
        with starting(*flags(tmp_path)) as second:
            assert second.process.wait(120) == exit_codes.BAD_CONFIG
            assert "another server uses" in second.log
        assert same(await answers(server, given), expected)


async def test_a_thousand_damaged_files_change_no_answer(tmp_path: Path) -> None:
    given = prompts(2)
    folder, other = tmp_path / "kv", tmp_path / "other"
    with serving(*flags(other)) as server:  # another key of the folder
        await answers(server, given[:4])
        written(other, 4 * (PROMPT_TOKENS // BLOCK))
    foreign = [file.read_bytes() for file in block_files(other)[:20]]
    with serving(*flags(folder)) as server:
        expected = await answers(server, given)
        written(folder, FILES)
    assert damage(folder, foreign, 5) >= 1000
    hits = 0.0
    for _ in range(3):  # a damaged file behind another one is seen once that one is whole again
        with serving(*flags(folder)) as server:
            assert same(await answers(server, given), expected)
            assert server.metric("http_requests_total", status="500") == 0
            hits = server.metric("kv_store_hits")
            damage(folder, foreign, 6, share=0.05)  # also while it runs
            assert same(await answers(server, given), expected)
    assert hits > 0


async def test_bound_holds_under_a_flood_and_after_a_restart_with_less(tmp_path: Path) -> None:
    bound = 8 << 20
    sizes: list[int] = []

    def on_disk() -> int:
        found = 0
        for file in tmp_path.glob("model-*/*"):
            try:
                found += file.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return found

    async def watch() -> None:
        while True:
            sizes.append(await asyncio.to_thread(on_disk))
            await asyncio.sleep(0.005)

    with serving(*flags(tmp_path, "--kv-cache-dir-bytes", bound)) as server:
        watcher = asyncio.create_task(watch())
        async with server.http() as http:
            flood = [complete(http, body(prompt)) for prompt in prompts(3, 60)]
            await asyncio.gather(*flood)
        eventually(lambda: server.metric("kv_store_evictions") > 100, "files leave")
        await asyncio.sleep(0.5)
        watcher.cancel()
    assert max(sizes) <= bound
    assert max(sizes) > bound // 2
    with serving(*flags(tmp_path, "--kv-cache-dir-bytes", bound // 4)) as server:
        assert on_disk() <= bound // 4
        await answers(server, prompts(3, 1))
        assert server.metric("kv_store_bytes") <= bound // 4


async def test_keys_and_models_have_blocks_of_their_own(tmp_path: Path) -> None:
    given = prompts(4, 2)
    keys = ("--api-key", ALICE, "--api-key", BOB)
    with serving(*flags(tmp_path, *keys)) as server:
        expected = await answers(server, given, ALICE)
    with serving(*flags(tmp_path, *keys)) as server:
        found = await answers(server, given, BOB)
        assert same(found, expected)
        assert [answer.cached for answer in found] == [0, 0]
        found = await answers(server, given, ALICE)
        assert same(found, expected)
        assert [answer.cached for answer in found] == [800, 800]
    with serving(*flags(tmp_path, "--kv-cache-dtype", "int8")) as server:
        assert [answer.cached for answer in await answers(server, given)] == [0, 0]


async def test_streams_go_on_while_prompts_come_from_the_folder(tmp_path: Path) -> None:
    given = prompts(6, 10)
    with serving(*flags(tmp_path)) as server:
        expected = await answers(server, given)
        written(tmp_path, 10 * (PROMPT_TOKENS // BLOCK))
    with serving(*flags(tmp_path)) as server:
        async with server.http() as http:
            alone = await complete(http, body(list(range(400, 420)), max_tokens=200, stream=True))
            stream = asyncio.create_task(
                complete(http, body(list(range(400, 420)), max_tokens=200, stream=True))
            )
            found = await asyncio.gather(*(complete(http, body(prompt)) for prompt in given))
            assert same(list(found), expected)
            assert [answer.cached for answer in found] == [800] * 10
            assert same([await stream], [alone])


async def test_folder_that_cannot_be_used_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cases = [
        (("demo", "--kv-cache-dir", tmp_path / "file"), "cannot open"),
        (("demo-translate", "--kv-cache-dir", tmp_path / "a"), "is for decoders"),
        (flags(tmp_path / "b", "--no-enable-prefix-caching"), "needs --enable-prefix-caching"),
        (flags(tmp_path / "c", "--kv-cache-dir-bytes", 5), "is less than a block"),
    ]
    for arguments, message in cases:
        with starting(*arguments) as server:
            assert server.process.wait(120) == exit_codes.BAD_CONFIG
            assert message in server.log
