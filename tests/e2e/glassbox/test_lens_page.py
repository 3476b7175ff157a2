"""The Python block of docs/lens.md runs against a server."""

from __future__ import annotations

import re
from typing import Any

from tests.support.process import ROOT
from tests.support.serve import Server

ADDRESS = "http://127.0.0.1:8000"


def test_python_block_of_the_page_returns_attention_weights(demo: Server) -> None:
    page = (ROOT / "docs/lens.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert ADDRESS in block
    found: dict[str, Any] = {}
    exec(block.replace(ADDRESS, demo.base_url), found)
    second = found["attention"]("the mill", layers=[1], url=demo.base_url)
    weights, previous = found["weights"], found["previous"]
    layers, heads, queries, keys = weights.shape
    assert queries == keys > 1
    assert abs(weights.sum(-1) - 1).max() < 1e-3
    assert previous.shape == (layers, heads)
    assert second.shape[:2] == (1, heads)
