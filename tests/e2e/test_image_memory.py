"""The plan of a model that sees holds while it reads pictures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from loadtest.random_smolvlm import write_random_smolvlm
from tests.e2e.test_memory import MB, planned, resident
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import png_url

pytestmark = pytest.mark.slow
EDGE = 1024  # pixels: a picture becomes 4 tiles and an overview, to save time
PICTURES = 12
KV_BYTES = 64 << 20


def body(number: int) -> dict[str, Any]:
    picture = Image.new("RGB", (640, 640), (number * 20, 90, 200 - number))
    url = png_url(picture)
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


async def most_resident(server: Server) -> int:
    """Return the most resident bytes of the server and its processes while it reads pictures."""
    most = 0
    is_over = asyncio.Event()

    async def watch() -> None:
        nonlocal most
        family = psutil.Process(server.process.pid)
        while not is_over.is_set():
            known = {server.process.pid, server.engine.pid}
            others = [each for each in family.children(recursive=True) if each.pid not in known]
            most = max(most, resident(server) + sum(each.memory_info().rss for each in others))
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    async with server.http() as http:

        async def one(number: int) -> None:
            answer = await http.post("/v1/chat/completions", json=body(number), timeout=300)
            assert answer.status_code == 200, answer.text

        await asyncio.gather(*(one(number) for number in range(PICTURES)))
    is_over.set()
    await watching
    return most


@pytest.mark.timeout(600)
async def test_memory_of_pictures_stays_within_the_plan(tmp_path: Path) -> None:
    folder = tmp_path / "smolvlm"
    write_random_smolvlm(folder)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"size": {"longest_edge": EDGE}}
    file.write_text(json.dumps(settings))
    flags = ("--kv-cache-memory-bytes", KV_BYTES, "--dtype", "bfloat16")
    promised = planned(*flags, model=folder)
    with serving(folder, *flags) as server:
        held = await most_resident(server)
        assert "Traceback" not in server.log
    print(f"\nplan {promised // MB} MB, at most {held // MB} MB")
    assert held <= 1.05 * promised
    assert held >= 0.4 * promised, "the plan asks for far too much"
