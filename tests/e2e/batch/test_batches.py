"""Batches whose process is killed in the middle: each line has one result in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.process import Process, eventually
from tests.support.serve import Server, engines_of, serving

FEW = pytest.param(60, 24, 1, id="60")
MANY = pytest.param(2000, 2, 8, id="2000", marks=[pytest.mark.slow, pytest.mark.timeout(900)])
SIZES = pytest.mark.parametrize(("count", "max_tokens", "at_once"), [FEW, MANY])
KILLS = 2
RUN_S = 600


def write_input(path: Path, count: int, max_tokens: int) -> Counter[str]:
    """Write a batch, whose last line fails, and return its custom_ids."""
    ids = [f"line-{place}" for place in range(count)]
    with path.open("w") as file:
        for place, custom_id in enumerate(ids):
            body: dict[str, Any] = {"prompt": f"Once {place}", "max_tokens": max_tokens}
            body["ignore_eos"] = True
            if place == count - 1:
                body["temperature"] = -1
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")
    return Counter(ids)


def results(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class RunBatch(Process):
    """`penstock run-batch` with the demo model."""

    def __init__(self, folder: Path, at_once: int, *more: str) -> None:
        command = [sys.executable, "-m", "server", "run-batch", str(folder / "in.jsonl")]
        command += ["-o", str(folder / "out.jsonl"), "--concurrency", str(at_once), *more]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        super().__init__(command, folder / "stderr", clean)


@pytest.mark.slow
@SIZES
def test_command_killed_twice_answers_each_line_once(
    tmp_path: Path, count: int, max_tokens: int, at_once: int
) -> None:
    ids = write_input(tmp_path / "in.jsonl", count, max_tokens)
    output = tmp_path / "out.jsonl"
    model = ("demo", "--threads", "1")
    for kill in range(1, KILLS + 1):
        command = RunBatch(tmp_path, at_once, *model)
        least = count * kill // (KILLS + 1)
        eventually(lambda: lines_in(output) >= least, f"{least} lines", RUN_S)  # noqa: B023
        engines = engines_of(command.process.pid)
        command.signal(signal.SIGKILL)
        command.status()
        assert lines_in(output) < count - 1, "the command was killed too late"
        eventually(lambda: not any(map(psutil.Process.is_running, engines)), "its engine ends")  # noqa: B023
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_0","custom_id":"line-1","resp')  # as a power failure would
    assert RunBatch(tmp_path, at_once, *model).status(RUN_S) == 1  # one line has failed
    answers = results(output.read_text())
    [failure] = results((tmp_path / "out.errors.jsonl").read_text())
    assert failure["custom_id"] == f"line-{count - 1}"
    assert Counter(each["custom_id"] for each in [*answers, failure]) == ids
    assert {each["response"]["status_code"] for each in answers} == {200}
    assert len({each["id"] for each in answers}) == len(answers)


@pytest.mark.slow
@SIZES
def test_server_killed_twice_answers_each_line_once(
    tmp_path: Path, count: int, max_tokens: int, at_once: int
) -> None:
    ids = write_input(tmp_path / "in.jsonl", count, max_tokens)
    store = tmp_path / "store"
    flags = ("demo", "--batch-dir", store, "--max-num-seqs", 2 * at_once, "--no-access-log")
    batch_id = ""
    for kill in range(1, KILLS + 1):
        with serving(*flags) as server:
            with client_of(server) as sdk:
                if not batch_id:
                    file = sdk.files.create(file=tmp_path / "in.jsonl", purpose="batch")
                    batch_id = sdk.batches.create(
                        input_file_id=file.id,
                        endpoint="/v1/completions",
                        completion_window="24h",
                    ).id
                least = count * kill // (KILLS + 1)
                eventually(lambda: done_lines(sdk, batch_id) >= least, f"{least} lines", RUN_S)  # noqa: B023
            engine = server.engine
            server.signal(signal.SIGKILL)
            server.status()
            eventually(lambda: not engine.is_running(), "its engine ends")  # noqa: B023
    with serving(*flags) as server, client_of(server) as sdk:
        assert sdk.batches.retrieve(batch_id).status in ("in_progress", "validating")
        eventually(lambda: sdk.batches.retrieve(batch_id).status == "completed", "its end", RUN_S)
        batch = sdk.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (count, count - 1, 1)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = results(sdk.files.content(batch.output_file_id).text)
        errors = results(sdk.files.content(batch.error_file_id).text)
    assert Counter(each["custom_id"] for each in answers + errors) == ids


@pytest.mark.slow
def test_server_stopped_by_a_signal_ends_at_once_and_resumes(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 60, 24)
    flags = ("demo", "--batch-dir", tmp_path / "store", "--max-num-seqs", 2, "--no-access-log")
    with serving(*flags) as server, client_of(server) as sdk:
        file = sdk.files.create(file=tmp_path / "in.jsonl", purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(lambda: done_lines(sdk, batch.id) >= 5, "some lines")
        server.signal(signal.SIGTERM)
        assert server.status(10) == 0
        assert "Traceback" not in server.log
    with serving(*flags) as server, client_of(server) as sdk:
        eventually(lambda: sdk.batches.retrieve(batch.id).status == "completed", "its end", RUN_S)
        ended = sdk.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        assert ended.error_file_id is not None
        answers = results(sdk.files.content(ended.output_file_id).text)
        errors = results(sdk.files.content(ended.error_file_id).text)
    assert Counter(each["custom_id"] for each in answers + errors) == ids
    assert len(errors) == 1


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0)


def done_lines(sdk: openai.OpenAI, batch_id: str) -> int:
    counts = sdk.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


@pytest.mark.slow
def test_command_uses_a_running_server_and_continues_when_it_is_back(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 20, 4)
    output = tmp_path / "out.jsonl"
    with serving("demo", env={"PENSTOCK_API_KEY": "sk-1"}) as server:
        url = server.base_url
        refused = RunBatch(tmp_path, 4, "--url", url)
        assert refused.status() == 1
        assert "--api-key" in refused.log
        done = RunBatch(tmp_path, 4, "--url", f"{url}/v1", "--api-key", "sk-1")
        assert done.status() == 1  # one line has failed
    answers = results(output.read_text())
    errors = results((tmp_path / "out.errors.jsonl").read_text())
    assert Counter(each["custom_id"] for each in answers + errors) == ids
    again = RunBatch(tmp_path, 4, "--url", url)  # nothing is left to send
    assert again.status() == 1
    assert "20 of 20 lines, 1 failed" in again.log
    output.unlink()
    away = RunBatch(tmp_path, 4, "--url", url)
    assert away.status() == 1
    assert "the same command continues" in away.log


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{\n", "line 1: The line is not valid JSON"),
        ("", "The input has no lines"),
        ('{"custom_id":"a","method":"POST","url":"/v1/files","body":{}}', "url must be"),
    ],
)
def test_command_with_bad_input_names_the_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    command = RunBatch(tmp_path, 1, "demo")
    assert command.status() == 2
    assert words in command.log
    assert not (tmp_path / "out.jsonl").exists()


def test_command_leaves_foreign_files_as_they_are(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3, 1)
    output = tmp_path / "out.jsonl"
    for content in (b"my diary\n", b'{"id":"batch_req_1","custom_id":"other"}\n'):
        output.write_bytes(content)
        command = RunBatch(tmp_path, 1, "demo")
        assert command.status() == 2
        assert "out.jsonl" in command.log
        assert output.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_command_interrupted_says_how_to_continue(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    write_input(tmp_path / "in.jsonl", 60, 24)
    command = RunBatch(tmp_path, 1, "demo", "--threads", "1")
    eventually(lambda: lines_in(tmp_path / "out.jsonl") >= 2, "two lines", RUN_S)
    command.signal(number)
    assert command.status() == status
    assert "the same command continues" in command.last_line
    assert "Traceback" not in command.log


@pytest.mark.slow
def test_command_whose_engine_dies_keeps_its_results(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 60, 24)
    command = RunBatch(tmp_path, 1, "demo", "--threads", "1")
    eventually(lambda: lines_in(tmp_path / "out.jsonl") >= 2, "two lines", RUN_S)
    [engine] = engines_of(command.process.pid)
    engine.kill()
    assert command.status() == 3
    assert "the same command continues" in command.last_line
    assert not lines_in(tmp_path / "out.errors.jsonl")


@pytest.mark.slow
def test_two_commands_with_one_output_are_refused(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 60, 24)
    first = RunBatch(tmp_path, 1, "demo", "--threads", "1")
    eventually(lambda: lines_in(tmp_path / "out.jsonl") >= 1, "a line", RUN_S)
    command = [sys.executable, "-m", "server", "run-batch", str(tmp_path / "in.jsonl")]
    second = subprocess.run(
        [*command, "-o", str(tmp_path / "out.jsonl")], capture_output=True, text=True
    )
    first.signal(signal.SIGKILL)
    first.status()
    assert second.returncode == 2
    assert "Another process" in second.stderr
