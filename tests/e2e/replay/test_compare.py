"""`penstock compare` of the demo with a copy whose weights have noise, against transformers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.folder import model_folder
from tests.support.command_line import penstock
from tests.support.variant import noisy_copy

PROMPTS = ("Hello! Who are you?", "What is the capital of France?", "Count from one to five.")


def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "compare", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("compare")
    noisy_copy(model_folder("demo"), found / "other", noise=0.5)
    lines = [PROMPTS[0], json.dumps({"prompt": PROMPTS[1]})]
    lines.append(json.dumps({"messages": [{"role": "user", "content": PROMPTS[2]}]}))
    (found / "prompts").write_text("\n\n".join(lines))
    return found


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    output = folder / "out.json"
    prompts = ("--prompts", folder / "prompts", "--max-tokens", 12, "--dtype", "float32")
    done = run("demo", folder / "other", *prompts, "-o", output)
    assert "Who are you" in done.stdout
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.slow
def test_answers_are_the_greedy_ones_of_each_model(document: dict[str, Any], folder: Path) -> None:
    for place, path in enumerate((model_folder("demo"), folder / "other")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
        for entry, prompt in zip(document["prompts"], PROMPTS, strict=True):
            ids = chat_ids(tokenizer, prompt)
            answer = entry["answers"][place]["tokens"]
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
            best = logits.max(-1).values
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert (best - chosen).max() < 1e-3
            assert entry["answers"][place]["text"] == "".join(entry["answers"][place]["pieces"])


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(found)


def test_distances_are_those_of_transformers(document: dict[str, Any], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("demo"))
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (model_folder("demo"), folder / "other")
    ]
    largest = 0.0
    for entry, prompt in zip(document["prompts"], PROMPTS, strict=True):
        ids = chat_ids(tokenizer, prompt)
        assert [(one["model"], one["writer"]) for one in entry["distances"]] == [(1, 0), (1, 1)]
        for one in entry["distances"]:
            answer = entry["answers"][one["writer"]]["tokens"]
            whole = torch.tensor([ids + answer])
            rows = slice(len(ids) - 1, -1)
            logprobs = [torch.log_softmax(m(whole).logits[0, rows].double(), -1) for m in models]
            own, other = logprobs[one["writer"]], logprobs[1 - one["writer"]]
            expected = ((own.exp() * (own - other)).sum(-1) / math.log(2)).tolist()
            assert [token["kl"] for token in one["tokens"]] == pytest.approx(expected, abs=1e-4)
            largest = max(largest, *expected)
            best = [tokenizer.decode([i]) for i in other.argmax(-1).tolist()]
            assert [token["best"] for token in one["tokens"]] == best
    assert largest > 0.1  # the models do differ


def test_first_difference_is_where_the_answers_part(document: dict[str, Any]) -> None:
    parted = 0
    for entry in document["prompts"]:
        first, other = (answer["tokens"] for answer in entry["answers"])
        place = entry["answers"][1]["parts_at"]
        if place is None:
            assert first == other
        else:
            parted += 1
            assert first[:place] == other[:place]
            assert first[place : place + 1] != other[place : place + 1]
    assert parted


@pytest.mark.slow
def test_models_with_other_tokens_have_answers_and_no_distance(folder: Path) -> None:
    other = folder / "renamed"
    noisy_copy(model_folder("demo"), other, noise=0.0)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    output = folder / "renamed.json"
    prompts = ("--prompts", folder / "prompts", "--max-tokens", 4)
    done = run("demo", other, *prompts, "-o", output)
    assert "other tokens" in done.stdout
    document = json.loads(output.read_text())
    assert all(not entry["distances"] for entry in document["prompts"])
    assert all(len(entry["answers"]) == 2 for entry in document["prompts"])


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("models", "lines", "message"),
    [
        (("demo",), "Hi", "at least two models"),
        (("demo", "demo"), "", "1 to 1000 are needed"),
        (("demo", "demo"), '{"text": 1}', "a line is a text"),
        (("demo", "demo"), "{", "is not JSON"),
        (("demo", "demo"), '{"a":' * 100_000, "is not JSON"),
        (("demo", "demo"), '{"messages": []}', "a line is a text"),
        (("demo", "demo"), "word " * 20_000, "which the longest prompt and --max-tokens have"),
        (("demo", "nowhere"), "Hi", "nowhere"),
        pytest.param(
            *(("demo-translate", "demo-translate"), "Hi", "only decoders"), marks=pytest.mark.slow
        ),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, models: tuple[str, ...], lines: str, message: str
) -> None:
    (tmp_path / "prompts").write_text(lines)
    done = penstock("compare", *models, "--prompts", str(tmp_path / "prompts"))
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("say [/b] [red]x[/red] \x1b[31m")
    done = run("demo", "demo", "--prompts", tmp_path / "prompts", "--max-tokens", 2)
    assert "say [/b] [red]x[/red] \\x1b[31m" in done.stdout


def test_output_without_a_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Hi")
    output = tmp_path / "nowhere" / "out.json"
    done = run("demo", "demo", "--prompts", tmp_path / "prompts", "-o", output, status=2)
    assert "there is no folder" in done.stderr.replace("\n", " ")
    assert "loading" not in done.stderr


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_process_of_the_models_ends_with_the_command(
    tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    """Ctrl-C in a terminal reaches the whole process group; `kill` only the command."""
    (tmp_path / "prompts").write_text("Hi\n" * 500)
    command = [sys.executable, "-m", "server", "compare", "demo", "demo", "--max-tokens", "900"]
    command += ["--prompts", str(tmp_path / "prompts"), "--temperature", "2"]
    # A shell's background jobs ignore Ctrl-C, and so would the command if the tests are one.
    command = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"answers of" not in process.stderr.readline():
            assert process.poll() is None
        [child] = psutil.Process(process.pid).children()
        if whole_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) != 0
        child.wait(10)
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_forms_of_one_model_are_compared(folder: Path) -> None:
    prompts = folder / "one"
    prompts.write_text(PROMPTS[0])
    output = folder / "forms.json"
    forms = ("demo", "demo:bfloat16", "demo:int4")  # the first and the last in float32
    run(*forms, "--prompts", prompts, "--max-tokens", 6, "--dtype", "float32", "-o", output)
    document = json.loads(output.read_text())
    assert document["models"] == list(forms)
    [entry] = document["prompts"]
    largest = {
        one["model"]: max(token["kl"] for token in one["tokens"])
        for one in entry["distances"]
        if one["writer"] == 0
    }
    assert 0 < largest[1] < largest[2]
