"""Every template, ours or published: its format is found, and its own calls are parsed back."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest

from server.config import ReasoningParser, ToolCallParser
from server.text.chat_template import ChatTemplate, TemplateError, TemplateLimitError
from server.text.load_template import TemplateFile, open_template
from server.text.parsers.detect import PROBES, PROBING_S, AnswerFormat, Prober, detect
from server.text.parsers.formats import BY_NAME, CALL_FORMATS, REASONING_BY_NAME
from server.text.parsers.syntax import State
from tests.support.parsing import check_cuts, parse
from tests.support.reference_data import located, reference, references
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.usefixtures("renders_here")

FOLDER = "chat-templates"
DEMO = Path(__file__).parents[4] / "engine" / "demo" / "model" / "chat_template.jinja"
OWN = sorted(file.stem for file in located(FOLDER).glob("*.jinja"))
# The reasoning of our templates. Each is named after the format of its calls.
OWN_REASONING = {
    "apertus": "apertus",
    "apriel": "apriel",
    "cohere_command": "cohere",
    "deepseek_v3_1": "think",
    "gemma4": "gemma4",
    "glm": "think",
    "harmony": "harmony",
    "hermes": "think",
    "minimax_m2": "think",
    "mistral": "mistral",
    "seed_oss": "seed_oss",
}
TOKEN = re.compile(r"<[|｜/]?[\w:▁｜]+[|｜]?>|\[/?[A-Z_]+\]|<\|\"\|>|<\w+\|>")
# Templates that show no calls, whose calls only their instructions or tokens name, or that fail.
NOT_SHOWN = {
    "CohereForAI-c4ai-command-r-plus-tool_use": None,
    "HuggingFaceTB-SmolLM3-3B": None,
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": None,
    "LFM2.5-Instruct": None,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_r1",
    "fireworks-ai-llama-3-firefunction-v2": "firefunction",
    "google-gemma-2-2b-it": None,
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "llama-cpp-deepseek-r1": "deepseek_r1",
    "llama-cpp-rwkv-world": None,
    "meetkai-functionary-medium-v3.2": None,
    "microsoft-Phi-3.5-mini-instruct": None,
}
INFERRED = {"GigaChat3-10B-A1.8B"}


def detected(file: Path, *, tokens: bool = True) -> tuple[AnswerFormat, Prober]:
    source = file.read_text(encoding="utf-8")
    template = open_template(TemplateFile(source, file), {"bos_token": "<s>", "eos_token": "</s>"})
    found = sorted(set(TOKEN.findall(source))) if tokens else []
    ids = {token: index for index, token in enumerate(found)}
    try:
        special = frozenset(ids.values())
        prober = Prober(template.render, source, ids, special)
        return detect(prober), prober
    finally:
        template.close()


def test_demo_template_shows_hermes_calls_and_thoughts() -> None:
    answers, prober = detected(DEMO)
    assert answers.calls is not None
    assert (answers.calls.name, answers.round_trips) == ("hermes", True)
    assert answers.reasoning == REASONING_BY_NAME["think"]
    check_cuts(answers.syntax, prober.answer, PROBES)


@pytest.mark.parametrize("effort", ["low", "medium", "high", "none", "minimal", None])
def test_demo_template_opens_a_thought_only_with_an_effort(effort: str | None) -> None:
    answers, _ = detected(DEMO)
    source = DEMO.read_text(encoding="utf-8")
    template = open_template(TemplateFile(source, DEMO), {})
    asked = [{"role": "user", "content": "Hi"}]
    prompt = template.render(asked, add_generation_prompt=True, reasoning_effort=effort)
    template.close()
    is_thinking = effort in ("low", "medium", "high")
    assert (answers.start(prompt) is State.REASONING) == is_thinking
    assert (f"Think first: {effort}<|im_end|>" in prompt) == is_thinking


def test_demo_template_drops_the_thoughts_of_earlier_turns() -> None:
    template = open_template(TemplateFile(DEMO.read_text(encoding="utf-8"), DEMO), {})
    call = {"function": {"name": "f", "arguments": {}}}
    thought = {"role": "assistant", "content": ""}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {**thought, "reasoning_content": "call f", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    kept = template.render(turn, add_generation_prompt=True, reasoning_effort="low")
    dropped = template.render([*turn, {"role": "user", "content": "Hi"}], reasoning_effort="low")
    template.close()
    assert "<think>\ncall f\n</think>\n\n<tool_call>" in kept
    assert "call f" not in dropped


def file_of(stem: str) -> Path:
    return located(f"{FOLDER}/{stem}.jinja")


@pytest.mark.parametrize("stem", OWN)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.variants(18)
def test_own_template_is_detected_and_its_calls_survive_splits(stem: str, tokens: bool) -> None:
    answers, prober = detected(file_of(stem), tokens=tokens)
    assert answers.reasoning_name == OWN_REASONING.get(stem)
    assert answers.is_opened_on_request == (stem == "deepseek_v3_1")
    if stem == "plain":
        assert (answers.calls, answers.source, answers.round_trips) == (None, "none", False)
        return
    name = "template" if stem == "invented" else stem
    source = "template" if stem == "invented" else "table"
    assert answers.calls is not None
    assert (answers.calls.name, answers.source, answers.round_trips) == (name, source, True)
    marked = answers.syntax.marks.encode(prober.answer)
    answer = parse(answers.syntax, [marked], PROBES)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == prober.called
    check_cuts(answers.syntax, prober.answer, PROBES, every=1 if is_thorough() else 7)


@pytest.mark.parametrize("name", references(f"{FOLDER}/*.jinja"))
def test_published_template_is_detected_and_its_calls_survive_splits(name: str) -> None:
    file = located(name)
    answers, prober = detected(file)
    if file.stem in NOT_SHOWN:
        name = answers.calls.name if answers.calls else None
        assert (name, answers.round_trips) == (NOT_SHOWN[file.stem], False)
        return
    assert answers.round_trips
    assert answers.source == ("template" if file.stem in INFERRED else "table")
    called = prober.called
    marked = answers.syntax.marks.encode(prober.answer)
    answer = parse(answers.syntax, [marked], PROBES)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == called
    # The tests of the formats split the answers of each format at every place.
    check_cuts(answers.syntax, prober.answer, PROBES, every=1 if is_thorough() else 7)


@pytest.mark.assets
@pytest.mark.parametrize(
    "stem", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "Mistral-Small-3.2-24B-Instruct-2506"]
)
def test_detection_needs_no_tokens(stem: str) -> None:
    answers, _ = detected(file_of(stem), tokens=False)
    assert answers.round_trips


@pytest.mark.assets
@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("Qwen-Qwen3-0.6B", "think"),
        ("ByteDance-Seed-OSS", "seed_oss"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere"),
        ("google-gemma-4-31B-it", "gemma4"),
        ("Apertus-8B-Instruct", "apertus"),
        ("Apriel-1.6-15b-Thinker-fixed", "apriel"),
        ("Qwen-Qwen2.5-7B-Instruct", None),
    ],
)
def test_reasoning_of_published_template_is_found(stem: str, name: str | None) -> None:
    answers, _ = detected(file_of(stem))
    assert answers.reasoning == (REASONING_BY_NAME[name] if name else None)


@pytest.mark.assets
@pytest.mark.parametrize(
    ("stem", "is_opened_on_request"),
    [
        ("deepseek-ai-DeepSeek-V3.1", True),
        ("Bielik-11B-v3.0-Instruct", True),
        ("Qwen-Qwen3-0.6B", False),  # the model itself opens its reasoning
        ("Qwen-Qwen2.5-7B-Instruct", False),
    ],
)
def test_template_that_opens_reasoning_on_request_is_found(
    stem: str, is_opened_on_request: bool
) -> None:
    answers, _ = detected(file_of(stem))
    assert answers.is_opened_on_request == is_opened_on_request


@pytest.mark.parametrize(
    ("stem", "old", "new"),
    [
        ("hermes", "tool_call>", "do_this>"),
        ("qwen3_coder", "parameter", "argument"),
        ("deepseek_v3_1", "tool▁sep", "tool▁then"),
        ("nemotron", "TOOLCALL", "CALLS"),
        reference("Qwen-Qwen2.5-7B-Instruct", "tool_call>", "do_this>"),
        reference("Qwen3-Coder", "parameter", "argument"),
        reference("deepseek-ai-DeepSeek-V3.1", "tool▁sep", "tool▁then"),
        reference("NVIDIA-Nemotron-Nano-v2", "TOOLCALL", "CALLS"),
    ],
)
def test_unknown_marks_are_inferred_from_what_the_template_renders(
    tmp_path: Path, stem: str, old: str, new: str
) -> None:
    file = tmp_path / f"{stem}.jinja"
    source = file_of(stem).read_text(encoding="utf-8").replace(old, new)
    file.write_text(source, encoding="utf-8")
    answers, prober = detected(file)
    assert (answers.source, answers.round_trips) == ("template", True)
    check_cuts(answers.syntax, prober.answer, PROBES)


@pytest.mark.parametrize(
    ("marks", "name"),
    [
        ('<minimax:tool_call><invoke name="f"><parameter name="key">', "minimax_m2"),
        ('<minimax:tool_call><invoke name="f">', None),
        ("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", None),
    ],
)
def test_template_without_calls_has_a_format_only_if_it_names_all_marks(
    tmp_path: Path, marks: str, name: str | None
) -> None:
    file = tmp_path / "chat_template.jinja"
    turns = "{% for message in messages %}{{ message.content }}{% endfor %}"
    file.write_text(f"Write calls as {marks}.{turns}", encoding="utf-8")
    answers, _ = detected(file)
    assert (answers.calls.name if answers.calls else None) == name


def test_flag_overrides_what_is_found() -> None:
    file = file_of("hermes")
    source = file.read_text(encoding="utf-8")
    template = open_template(TemplateFile(source, file), {})
    try:
        prober = Prober(template.render, source, {}, frozenset())
        answers = detect(prober, calls=BY_NAME["pythonic"], reasoning=None)
    finally:
        template.close()
    assert answers.calls is BY_NAME["pythonic"]
    assert (answers.source, answers.round_trips, answers.reasoning) == ("flag", False, None)


def test_every_format_is_a_choice_of_the_flag() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", *(f.name for f in CALL_FORMATS)}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_BY_NAME}


class Clock:
    """Renders any messages, and takes `seconds` for it."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.now = 100.0
        self.num_renderings = 0
        self._seconds = seconds
        self._error = error

    def monotonic(self) -> float:
        return self.now

    def render(self, messages: object, **arguments: object) -> str:
        self.num_renderings += 1
        self.now += self._seconds
        if self._error is not None:
            raise self._error
        return "text"


def test_detection_stops_at_the_first_rendering_over_a_limit(monkeypatch) -> None:
    clock = Clock(1.5, TemplateLimitError("took too long"))
    monkeypatch.setattr("server.text.parsers.detect.time", clock)
    answers = detect(Prober(clock.render, "<tool_call>", {}, frozenset()))
    assert clock.num_renderings == 1
    assert (answers.calls, answers.round_trips) == (BY_NAME["hermes"], False)


def test_detection_with_a_slow_template_is_short(monkeypatch) -> None:
    clock = Clock(1.4)
    monkeypatch.setattr("server.text.parsers.detect.time", clock)
    detect(Prober(clock.render, "", {}, frozenset()))
    assert clock.now - 100 <= PROBING_S + 1.4


@pytest.mark.parametrize(
    "answer",
    ["[" * 8000, "{" * 8000, "[1," * 2000, "x" * 100_000, '{"a":' * 1500, "<tool_call>" * 500],
    ids=lambda answer: answer[:4],
)
def test_detection_survives_any_answer(answer: str) -> None:
    def render(messages: list[dict[str, object]], **arguments: object) -> str:
        is_answer = "tool_calls" in messages[-1]
        return f"What is new?{answer}probe_alpha probe_beta" if is_answer else "What is new?"

    start = time.process_time()
    assert not detect(Prober(render, "", {}, frozenset())).round_trips
    assert time.process_time() - start < 5


def test_template_that_fails_is_tried_in_other_forms_but_not_after_a_limit() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    renderer = mock.Mock()
    template = ChatTemplate("", {}, frozenset(), renderer)
    for error, count in ((TemplateLimitError("took too long"), 1), (None, 4)):
        render = renderer.render
        render.reset_mock()
        render.side_effect = error
        render.return_value = {"error": "no"}
        with pytest.raises(TemplateError):
            template.render(messages)
        assert render.call_count == count
