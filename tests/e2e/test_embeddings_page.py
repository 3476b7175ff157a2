"""The programs of docs/embeddings.md run against servers, and its tables are true."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cross_encoder_cases import CrossEncoderCase
from tests.support.encoder_sizes import EMBEDDERS, RERANKERS, table
from tests.support.process import ROOT
from tests.support.real_encoder import RealEncoder
from tests.support.rig import serving
from tests.support.sentence_cases import SentenceCase
from tests.support.serve import serving as serving_process

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
SEARCH, RERANK, PROMPTS, BITS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EMBEDDER, RERANKER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
QUESTION = "How do I bake bread?"
SUBJECTS = ("the river", "a violin", "taxes", "glaciers", "chess", "the tide", "bees", "a train")


def notes(count: int) -> list[str]:
    return [f"{SUBJECTS[n % len(SUBJECTS)]} {n}" for n in range(count)]


def run(program: str, names: dict[str, Any], folder: Path, **addresses: str) -> list[str]:
    """Run a program of the page in `folder` with the `names` of those before; return its lines."""
    for address, used in ((EMBEDDER, "embedder"), (RERANKER, "reranker")):
        program = program.replace(address, addresses.get(used, address))
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(program, names)
    return printed.getvalue().splitlines()


async def test_programs_of_the_page_search_rerank_and_compare_bits(tmp_path: Path) -> None:
    texts = [*notes(40), "", QUESTION, *notes(520)[40:]]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    sentences = SentenceCase("", {"pooling_mode": ["cls", "mean"]}).write(tmp_path / "sentences")
    pairs = CrossEncoderCase("").write(tmp_path / "pairs")
    names: dict[str, Any] = {}
    async with (
        serving(RealEncoder(sentences), sentences, served_model_name=("embedder",)) as embedder,
        serving(RealEncoder(pairs), pairs, served_model_name=("reranker",)) as reranker,
    ):
        addresses = {
            "embedder": f"http://127.0.0.1:{embedder.port}",
            "reranker": f"http://127.0.0.1:{reranker.port}",
        }

        async def printed(program: str) -> list[str]:
            return await asyncio.to_thread(run, program, names, tmp_path, **addresses)

        found = await printed(SEARCH)
        assert len(found) == 5
        assert found[0] == f"1.000 {QUESTION}"
        assert names["vectors"].shape == (521, 24)

        ranked = [line.split(" ", 1) for line in await printed(RERANK)]
        scores = [float(score) for score, _ in ranked]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
        assert {text for _, text in ranked} <= set(names["near"])
        assert len(names["near"]) == 50

        await printed(PROMPTS)
        written = [f"passage: {text}" for text in names["texts"][:3]] + [f"query: {QUESTION}"]
        due = await asyncio.to_thread(names["embed"], written)
        assert np.allclose(names["vectors"][:3], due[:3], atol=1e-6)
        assert np.allclose(names["query"], due[3], atol=1e-6)

        await printed(BITS)
        scores = names["vectors"] @ names["query"]
        candidates = names["candidates"]
        assert len(candidates) == 200
        assert names["best"][0] == candidates[scores[candidates].argmax()]
        body = {"model": "embedder", "texts": written, "embedding_types": ["ubinary"]}
        answer = (await embedder.http.post("/v2/embed", json=body)).json()
        assert answer["embeddings"]["ubinary"][:3] == names["bits"][:3].tolist()


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]


def test_tables_of_the_page_are_those_that_are_planned() -> None:
    rows = {cells[1]: cells for cells in map(cells_of, PAGE.splitlines()) if len(cells) == 8}
    for *due, memory, _ in map(cells_of, table([*EMBEDDERS, *RERANKERS])):
        *found, shown, _ = rows[due[1]]
        assert found == due
        assert abs(float(shown) - float(memory)) <= 0.2, "CPUs have other kernels and buffers"
    named = re.findall(r"penstock serve (\S+/\S+)", PAGE)
    assert {encoder.name for encoder in (*EMBEDDERS, *RERANKERS)} >= set(named)


@pytest.mark.slow
def test_search_of_the_page_finds_bread_among_10_000_real_texts(
    minilm: Path, tmp_path: Path
) -> None:
    bread = "A recipe for a loaf of sourdough: flour, water, salt, and a long night of rest."
    (tmp_path / "texts.txt").write_text("\n".join([*notes(9_999), bread]))
    with serving_process(minilm, "--served-model-name", "embedder") as server:
        found = run(SEARCH, {}, tmp_path, embedder=server.base_url)
    assert found[0].endswith(bread)
