"""Thinking: what each API's fields become for each kind of chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.generation.thinking import Thinking
from server.text.chat_template import ChatTemplate
from server.text.load_template import TemplateFile, open_template
from tests.server.conftest import write_model
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

# As Qwen3 and GLM, DeepSeek V3.1, Seed-OSS, our demo, Solar, gpt-oss, and DeepSeek R1 write it.
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}OFF{% else %}ON{% endif %}"
BOTH = (
    "{% if thinking is not defined %}{% set thinking = enable_thinking | default(false) %}"
    "{% endif %}{{ 'ON' if thinking else 'OFF' }}"
)
BUDGET = "{{ 'OFF' if thinking_budget == 0 else 'ON ' ~ thinking_budget | default(-1) }}"
WORDS = "{{ 'OFF' if reasoning_effort | default('none') in ['none', 'minimal'] else 'ON' }}"
LOW = (
    "{% if reasoning_effort in ['low', 'minimal'] %}OFF{% else %}{{ reasoning_effort }}{% endif %}"
)
LEVEL = "{{ reasoning_effort | default('medium') }}"
ALWAYS = "ON"


def template_of(source: str) -> ChatTemplate:
    return open_template(TemplateFile(source, Path("chat_template.jinja")), {})


@pytest.mark.parametrize(
    ("source", "effort", "written", "ignored"),
    [
        (SWITCH, None, "ON", []),
        (SWITCH, "none", "OFF", []),
        (SWITCH, "minimal", "OFF", []),
        (SWITCH, "low", "ON", ["reasoning_effort"]),  # the template has no levels
        (SWITCH, "high", "ON", ["reasoning_effort"]),
        (BOTH, None, "OFF", []),
        (BOTH, "none", "OFF", []),
        (BOTH, "medium", "ON", ["reasoning_effort"]),
        (BUDGET, "none", "OFF", []),
        (BUDGET, "high", "ON -1", ["reasoning_effort"]),
        (WORDS, "none", "OFF", []),
        (WORDS, "minimal", "OFF", []),
        (WORDS, "low", "ON", []),
        (LOW, "none", "OFF", []),  # as "minimal", the word that it knows
        (LOW, "medium", "medium", []),
        (LEVEL, "none", "none", []),
        (LEVEL, "high", "high", []),
        (SWITCH + LEVEL, "low", "ONlow", []),
        (SWITCH + LEVEL, "none", "OFFnone", []),
        (ALWAYS, "none", "ON", ["reasoning_effort"]),
        (ALWAYS, "low", "ON", ["reasoning_effort"]),
    ],
)
def test_effort_sets_what_the_template_reads(
    source: str, effort: str | None, written: str, ignored: list[str]
) -> None:
    template, thinking = template_of(source), Thinking(effort)
    assert template.render([], **thinking.arguments(template, {})) == written
    assert thinking.ignored(template, {}) == ignored


ON, OFF = Thinking(is_on=True), Thinking(is_on=False)


@pytest.mark.parametrize(
    ("source", "thinking", "written", "ignored"),
    [
        (SWITCH, ON, "ON", []),
        (SWITCH, OFF, "OFF", []),
        (SWITCH, Thinking("high", is_on=False), "OFF", []),
        (SWITCH, Thinking("high", is_on=True), "ON", ["reasoning_effort"]),
        (BOTH, ON, "ON", []),
        (BOTH, OFF, "OFF", []),
        (BUDGET, OFF, "OFF", []),
        (BUDGET, ON, "ON -1", []),
        (BUDGET, Thinking(is_on=True, budget=512), "ON 512", []),
        (SWITCH, Thinking(is_on=True, budget=512), "ON", ["thinking.budget_tokens"]),
        (WORDS, ON, "ON", []),
        (WORDS, OFF, "OFF", []),
        (LOW, OFF, "OFF", []),
        (LEVEL, ON, "medium", []),
        (LEVEL, Thinking("high", is_on=True), "high", []),
        (LEVEL, OFF, "medium", ["thinking"]),  # it knows no word for "off"
        (ALWAYS, ON, "ON", ["thinking"]),
        (ALWAYS, OFF, "ON", ["thinking"]),
    ],
)
def test_switch_sets_what_the_template_reads(
    source: str, thinking: Thinking, written: str, ignored: list[str]
) -> None:
    template = template_of(source)
    assert template.render([], **thinking.arguments(template, {})) == written
    assert thinking.ignored(template, {}) == ignored


@pytest.mark.parametrize(
    ("source", "given", "written", "ignored"),
    [
        (SWITCH, {"enable_thinking": True}, "ON", ["reasoning_effort"]),
        (SWITCH, {"enable_thinking": False}, "OFF", []),
        (BOTH, {"thinking": True}, "ON", ["reasoning_effort"]),
        (BOTH, {"enable_thinking": True}, "ON", ["reasoning_effort"]),
        (LEVEL, {"reasoning_effort": "high"}, "high", ["reasoning_effort"]),
        (LEVEL, {"reasoning_effort": "none"}, "none", []),
        (BUDGET, {"thinking_budget": 9}, "ON 9", ["reasoning_effort"]),
        (SWITCH, {"other": 1}, "OFF", []),
        (ALWAYS, {"enable_thinking": False}, "ON", ["reasoning_effort"]),  # it reads no switch
    ],
)
def test_arguments_of_the_request_come_first(
    source: str, given: dict[str, Any], written: str, ignored: list[str]
) -> None:
    template, thinking = template_of(source), Thinking("none")
    assert template.render([], **thinking.arguments(template, given)) == written
    assert thinking.ignored(template, given) == ignored


def test_model_without_template_ignores_all() -> None:
    thinking = Thinking("low", is_on=True, budget=9)
    names = ["reasoning_effort", "thinking", "thinking.budget_tokens"]
    assert thinking.ignored(None, {}) == names
    assert Thinking().ignored(None, {}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "GLM-4.6", "GLM-4.7-Flash", "deepseek-ai-DeepSeek-V3.1"),
        *("HuggingFaceTB-SmolLM3-3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ByteDance-Seed-OSS"),
        *("Bielik-11B-v3.0-Instruct", "upstage-Solar-Open-100B"),
    ],
)
def test_published_templates_think_or_not_as_the_effort_says(assets: Path, name: str) -> None:
    template = template_of((assets / "chat-templates" / f"{name}.jinja").read_text())
    messages = [{"role": "user", "content": "Hi"}]
    prompts = {
        effort: template.render(messages, **Thinking(effort).arguments(template, {}))
        for effort in ("none", "minimal", "high")
    }
    off = template.render(messages, **Thinking(is_on=False).arguments(template, {}))
    assert prompts["none"] == prompts["minimal"] == off != prompts["high"]
    assert Thinking("none").ignored(template, {}) == []


ASKED = [{"role": "user", "content": "Hi"}]
NONE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "reasoning_effort": "none"},
    "/v1/chat/completions/render": {"messages": ASKED, "reasoning_effort": "none"},
    "/v1/responses": {"input": "Hi", "reasoning": {"effort": "none"}},
    "/v1/messages": {"messages": ASKED, "max_tokens": 5, "thinking": {"type": "disabled"}},
}


@pytest.mark.parametrize("path", NONE)
@pytest.mark.parametrize(("source", "written"), [(SWITCH, "OFF"), (ALWAYS, "ON")])
async def test_every_api_turns_thoughts_off_or_says_that_it_cannot(
    tmp_path: Path, says: Callable[[str], Script], path: str, source: str, written: str
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(source)
    async with serving(FakeEngine(says("x")), folder) as served:
        response = await served.http.post(path, json=NONE[path])
        assert response.status_code == 200, response.text
        assert prompt_of(served, response) == written
    name = "thinking" if path == "/v1/messages" else "reasoning_effort"
    assert response.headers.get("x-ignored-params") == (None if written == "OFF" else name)


def prompt_of(served: Served, response: Any) -> str:
    """Return the text of the prompt that reached the engine, or that was rendered."""
    if served.engine.requests:
        return served.app.state.penstock.tokenizer.decode(served.engine.requests[-1].prompt)
    return response.json()["prompt"]
