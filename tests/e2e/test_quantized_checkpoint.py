"""`penstock serve` of a quantised checkpoint over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import web
from tests.support.driver import Driver
from tests.support.quantized_files import FORMATS, write_quantized
from tests.support.serve import serving
from tests.support.stories import cases_of


@pytest.mark.slow
def test_answers_over_http_are_those_of_the_engine(llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, tmp_path / "tales", FORMATS["int8 channel"])
    case = cases_of(llama)[0]
    driver = Driver(tmp_path / "tales")
    request = driver.submit(case.prompt_ids, 30, temperature=0)
    driver.run()
    with serving(tmp_path / "tales", "--dtype", "float32", "--threads", "1") as server:
        body = {"prompt": case.prompt_ids, "max_tokens": 30, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        answer = web.post(f"{server.base_url}/v1/completions", json=body, timeout=60).json()
        [model] = web.get(f"{server.base_url}/v1/models").json()["data"]
    assert answer["choices"][0]["token_ids"] == driver.tokens(request)
    assert model["id"] == "tales"
