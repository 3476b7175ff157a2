"""The access log of the lines of a batch."""

from __future__ import annotations

import asyncio
import json

from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


def access(text: str) -> list[dict[str, object]]:
    records = [json.loads(line) for line in text.splitlines()]
    return [r for r in records if r["logger"] == "server.access" and r["level"] == "info"]


async def test_access_log_of_a_batch_line_has_no_client(capsys, model, says, tmp_path):
    line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}\n'
    async with serving(FakeEngine(says("x")), model, batch_dir=str(tmp_path)) as served:
        file = await served.openai.files.create(file=("in.jsonl", line), purpose="batch")
        made = await served.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        async with asyncio.timeout(20):
            batch = await served.openai.batches.retrieve(made.id)
            while batch.status != "completed":
                await asyncio.sleep(0.01)
                batch = await served.openai.batches.retrieve(made.id)
    records = access(capsys.readouterr().err)
    [line_record] = [record for record in records if record["path"] == "/v1/completions"]
    assert "client" not in line_record
    assert all(record["client"] == "127.0.0.1" for record in records if record is not line_record)
