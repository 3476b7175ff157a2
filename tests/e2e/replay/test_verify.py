"""`serve --record` and `penstock verify` as commands, on the demo models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.folder import model_folder
from engine.checkpoint.identity import weights_identity
from engine.config import EngineConfig
from tests.support import web
from tests.support.process import ROOT, eventually
from tests.support.recorded_requests import draw, send_all
from tests.support.serve import Server, serving

FEW, MANY = 30, 500
FLAGS = ("--dtype", "float32")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "record.jsonl"


@pytest.fixture(scope="module")
def server(record: Path) -> Iterator[Server]:
    with serving("demo", *FLAGS, "--record", record) as running:
        yield running


def verify(file: Path, server: Server, *flags: object) -> tuple[int, list[dict[str, Any]], str]:
    """Run the command; return its exit status, the objects on stdout, and stderr."""
    command = ["verify", file, "--url", server.base_url, "--json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "server", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def recorded(server: Server, record: Path, numbers: range, file: Path) -> Path:
    """Send requests in company and return a file with their records alone."""
    before = record.read_bytes() if record.exists() else b""
    asyncio.run(send_all(server.base_url, map(draw, numbers), at_once=8))
    # One line per choice. Each request has at least one, and its lines come together.
    eventually(
        lambda: len({line["id"] for line in lines_of(record, before)}) == len(numbers),
        "all requests are recorded",
    )
    time.sleep(0.2)  # the lines of the last request
    file.write_bytes(record.read_bytes().removeprefix(before))
    return file


def lines_of(record: Path, before: bytes) -> list[dict[str, Any]]:
    text = record.read_bytes().removeprefix(before)
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.slow
def test_requests_of_all_kinds_are_equal_in_any_company(
    server: Server, record: Path, tmp_path: Path
) -> None:
    file = recorded(server, record, range(FEW), tmp_path / "few.jsonl")
    count = len(file.read_text().splitlines())
    assert count > FEW  # some have several choices
    status, found, errors = verify(file, server, "--rounds", 2)
    assert found[-1] == {
        "event": "summary",
        "recorded": count,
        "equal": count,
        "different": 0,
        "refused": 0,
        "replays": 3 * count,
        "batch_invariant": True,
    }, errors
    assert status == 0


def test_fingerprint_is_made_from_the_weights(server: Server) -> None:
    found = web.get(f"{server.base_url}/capabilities", timeout=30).json()["system_fingerprint"]
    weights = weights_identity(EngineConfig(), model_folder("demo"))
    assert found["settings"]["weights"] == weights


def test_verification_on_the_recording_server_adds_nothing_to_its_file(
    server: Server, record: Path, tmp_path: Path
) -> None:
    recorded(server, record, range(3000, 3004), tmp_path / "unused.jsonl")
    before = record.read_bytes()
    status, found, errors = verify(record, server, "--rounds", 1)
    assert (status, found[-1]["refused"]) == (0, 0), errors
    after = recorded(server, record, range(3004, 3005), tmp_path / "one.jsonl")  # written in order
    lines = len(after.read_text().splitlines())
    assert len(record.read_bytes().splitlines()) == len(before.splitlines()) + lines


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_hundred_requests_are_equal_in_any_company(
    server: Server, record: Path, tmp_path: Path
) -> None:
    file = recorded(server, record, range(1000, 1000 + MANY), tmp_path / "many.jsonl")
    status, found, errors = verify(file, server, "--rounds", 3, "--concurrency", 32)
    print(found[-1])
    assert status == 0, (found, errors)
    assert found[-1]["equal"] == found[-1]["recorded"] > MANY


def test_changed_token_is_named_with_its_place(
    server: Server, record: Path, tmp_path: Path
) -> None:
    file = recorded(server, record, range(2000, 2004), tmp_path / "four.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    true = lines[1]["tokens"][-1]
    lines[1]["tokens"][-1] = 777
    file.write_text("\n".join(map(json.dumps, lines)))
    status, found, _ = verify(file, server, "--rounds", 0)
    [difference, summary] = found
    assert status == 1
    assert difference["event"] == "difference"
    assert (difference["line"], difference["id"]) == (2, lines[1]["id"])
    assert difference["index"] == len(lines[1]["tokens"]) - 1
    assert (difference["expected"], difference["got"]) == (777, true)
    assert (summary["different"], summary["equal"]) == (1, len(lines) - 1)


@pytest.mark.slow
def test_translations_are_recorded_and_equal(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving("demo-translate", *FLAGS, "--record", record) as server:
        for text in ("The dog is red.", "I see a house."):
            body = {"prompt": text, "max_tokens": 20, "temperature": 1, "n": 2}
            answer = web.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
        eventually(lambda: record.read_text().count("\n") == 4, "four choices are recorded")
        assert json.loads(record.read_text().splitlines()[0])["encoder_prompt_ids"]
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(record.read_bytes())
        status, found, errors = verify(copy, server, "--rounds", 1)
        assert (status, found[-1]["equal"]) == (0, 4), errors
