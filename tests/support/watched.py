"""Read /ui/api/watch of a real server, and rebuild the block tables in the test's own way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from server.glassbox.watch.frames import FIELDS

UI = {"x-penstock-ui": "1"}
Json = dict[str, Any]
OUT = FIELDS.index("out")


class Tables:
    """Block tables, findable blocks and counts of tokens, from a snapshot and what came behind."""

    def __init__(self, snapshot: Json) -> None:
        self.number: int = snapshot["seq"]
        self.tables: dict[int, dict[int, list[int]]] = {}  # request -> group -> blocks
        self.findable = set(snapshot["findable"])
        self.out = {request["id"]: request["out"] for request in snapshot["requests"]}
        self.decoding: set[int] = set()
        for request in snapshot["requests"]:
            filled = {g: list(t) for g, t in enumerate(request["tables"]) if t}
            if filled:
                self.tables[request["id"]] = filled

    def apply(self, frame: Json) -> None:
        self.number = frame["seq"]
        for _, _, _, _, joined, left, *_ in frame["steps"]:
            self.decoding = (self.decoding - set(left)) | set(joined)
            for key in self.decoding & self.out.keys():
                self.out[key] += 1
        for row in frame["requests"]:
            self.out[row[0]] = row[OUT]
        for kind, first, *rest in frame["kv"]:
            if kind == "find":
                self.findable |= set(first)
            elif kind == "forget":
                self.findable -= set(first)
            elif kind == "take":
                group, start, blocks = rest
                table = self.tables.setdefault(first, {}).setdefault(group, [])
                assert len(table) == start
                table.extend(blocks)
            elif kind == "pass":
                group, start, count = rest
                self.tables[first][group][start : start + count] = [0] * count
            else:
                assert kind in ("preempt", "end")
                self.tables.pop(first, None)
                if kind == "end":
                    self.out.pop(first, None)

    @property
    def num_held(self) -> int:
        tables = [table for groups in self.tables.values() for table in groups.values()]
        return len({block for table in tables for block in table if block})

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Tables)
        mine = (self.number, self.tables, self.findable, self.out)
        return mine == (other.number, other.tables, other.findable, other.out)


class Reader:
    """Applies the frames of an open view in the background."""

    def __init__(self) -> None:
        self.tables: Tables
        self.frames: list[Json] = []
        self.at: dict[int, Tables] = {}  # what the tables were at the end of each frame
        self.begun = asyncio.Event()

    async def read(self, response: httpx2.Response) -> None:
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name in ("hello", "frame"):
                self._take(name, json.loads(line.removeprefix("data: ")))

    def _take(self, name: str, document: Json) -> None:
        if name == "hello":
            self.tables = Tables(document)
            self.begun.set()
            return
        assert not document.get("lost")
        self.frames.append(document)
        self.tables.apply(document)
        kept = Tables({"seq": self.tables.number, "findable": self.tables.findable, "requests": []})
        kept.tables = json.loads(
            json.dumps(self.tables.tables), object_pairs_hook=lambda p: {int(k): v for k, v in p}
        )
        kept.out = dict(self.tables.out)
        self.at[kept.number] = kept


@contextlib.asynccontextmanager
async def reading(http: httpx2.AsyncClient) -> AsyncIterator[Reader]:
    """Open a view with blocks, and read it until the context ends."""
    reader = Reader()
    async with http.stream("GET", "/ui/api/watch?blocks=1", headers=UI) as response:
        assert response.status_code == 200, await response.aread()
        task = asyncio.create_task(reader.read(response))
        await asyncio.wait_for(reader.begun.wait(), 30)
        try:
            yield reader
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
