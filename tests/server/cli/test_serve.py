"""The command line of `penstock serve`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.cli.serve import spread
from server.exit_codes import BAD_CONFIG
from tests.support.command_line import penstock


def test_lora_modules_take_several_values_behind_one_flag() -> None:
    given = ["M", "--lora-modules", "a=/x", "b=y", "--port", "1", "c=z"]
    repeated = ["M", "--lora-modules", "a=/x", "--lora-modules", "b=y", "--port", "1", "c=z"]
    assert spread(given) == repeated
    assert spread(repeated) == repeated
    assert spread(["--lora-modules", "a=/x", "M"]) == ["--lora-modules", "a=/x", "M"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key-file", "{keys}"], "line 1: 'rpm' is not a setting of a key"),
        (["--admin-key-file", "{keys}"], "line 1: 'rpm' is not a setting of a key"),
        (["--api-key-file", "/no/such/file"], "Cannot read the API keys in /no/such/file"),
        (["--api-key", "a b"], "--api-key, key 1: an API key must not be empty or contain"),
        (["--ui", "--host", "0.0.0.0"], "--ui needs an API key if the server listens on 0.0.0.0"),
    ],
)
def test_serve_with_bad_keys_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key rpm=5\n")
    given = [argument.format(keys=keys) for argument in arguments]
    answer = penstock("serve", "/no/such/model", *given)
    assert answer.returncode == BAD_CONFIG
    assert words in answer.stderr
    assert "/no/such/model" not in answer.stderr


def test_key_file_module_imports_no_http_library() -> None:
    code = "import server.http.key_file, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "server.http.key_file" in done.stdout
    for heavy in ("starlette", "fastapi", "uvicorn", "torch", "zmq"):
        assert f"'{heavy}'" not in done.stdout
