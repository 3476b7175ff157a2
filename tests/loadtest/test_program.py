"""The programs of the load tests end with one line where a file is missing or another one."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from loadtest.errors import BenchError
from loadtest.micro.perplexity import windows_of
from loadtest.program import check_model, read_lines, run_program


def ends_with(main: object, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run_program(main)  # type: ignore[arg-type]
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_missing_file_ends_a_program_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ends_with(lambda: read_lines(tmp_path / "none.jsonl"), capsys)
    assert said.endswith("none.jsonl cannot be read: No such file or directory.\n")
    said = ends_with(lambda: (tmp_path / "no" / "out.json").write_text(""), capsys)
    assert said.endswith("out.json: No such file or directory\n")
    assert said.count("\n") == 1


def test_missing_model_ends_a_program_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(lambda: check_model("/no/such"), capsys).count("\n") == 1
    check_model("demo")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n[1]\n', "Line 2 .* is not a JSON object"),
        (b"{", "Line 1 .* is not a JSON object"),
        (b"\xff\xfe", "is not a text in UTF-8"),
    ],
)
def test_read_lines_refuses_other_content(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    with pytest.raises(BenchError, match=said):
        read_lines(file)


async def test_perplexity_of_a_short_text_says_how_many_tokens_are_needed() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"tokens": [1, 2, 3]})

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        assert await windows_of(client, "a text", 3) == [[1, 2, 3]]
        with pytest.raises(SystemExit, match=r"has 3 tokens, and 50000 are needed.*--tokens 3"):
            await windows_of(client, "a text", 50_000)
