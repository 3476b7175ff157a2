"""Contents that are lists of text parts: which templates read them, and what the others get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.chat_template import ChatTemplate, TemplateError
from server.text.content_parts import content_of, joined, text_parts, texts_of
from server.text.load_template import TemplateFile, open_template
from tests.server.conftest import write_model
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import serving

LOOP = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }} {% endfor %}{% endif %}</s>{% endfor %}"
)
TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
SUM = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}"
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}</s>{% endfor %}"
FIRST = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.content is string else m.content[0].text }}</s>{% endfor %}"
)
USER_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}{{ part.text }} {% endfor %}{% else %}{{ m.content }}{% endif %}"
    "</s>{% endfor %}"
)


def template_of(source: str) -> ChatTemplate:
    return open_template(TemplateFile(source, Path("chat_template.jinja")), {})


def test_contents_have_texts_and_can_be_joined() -> None:
    parts = text_parts(["a", "b"])
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [texts_of(content) for content in (parts, "a", "", None)] == [
        ["a", "b"],
        ["a"],
        [""],
        [""],
    ]
    assert [joined(content) for content in (parts, "a", None)] == ["a\nb", "a", ""]
    assert [content_of(texts) for texts in (["a", "b"], ["a"], [])] == [parts, "a", ""]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (LOOP, "<user>a b </s>"),
        (TEXT, "<user>a\nb</s>"),
        (SUM, "<user>a\nb</s>"),
        (JSON, '<user>"a\\nb"</s>'),
        (FIRST, "<user>a\nb</s>"),
        (USER_ONLY, "<user>a b </s>"),
    ],
)
async def test_template_gets_the_list_only_if_it_reads_it(source: str, written: str) -> None:
    template = template_of(source)
    for _ in range(2):  # the second time it is known
        text = await template.render_async([{"role": "user", "content": text_parts(["a", "b"])}])
        assert text == written
    assert await template.render_async([{"role": "user", "content": "a b"}]) == (
        '<user>"a b"</s>' if source == JSON else "<user>a b</s>"
    )


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
async def test_each_role_is_tried_for_itself(role: str) -> None:
    messages = [{"role": role, "content": text_parts(["a", "b"])}]
    assert await template_of(USER_ONLY).render_async(messages) == f"<{role}>a\nb</s>"
    assert await template_of(LOOP).render_async(messages) == f"<{role}>a b </s>"


@pytest.mark.parametrize(("source", "written"), [(LOOP, "<user>a b"), (TEXT, "<user>a\nb")])
async def test_last_part_can_be_continued(source: str, written: str) -> None:
    messages = [{"role": "user", "content": text_parts(["a", "b"])}]
    template = template_of(source)
    text = await template.render_async(messages, continue_final_message=True)
    assert text == written


async def test_refusal_of_the_trial_is_no_refusal_of_the_request() -> None:
    source = "{% if messages | length < 3 %}{{ raise_exception('short') }}{% endif %}" + LOOP
    messages = [{"role": "user", "content": text_parts(["a", "b"])}] * 3
    assert await template_of(source).render_async(messages) == "<user>a\nb</s>" * 3
    with pytest.raises(TemplateError, match="short"):
        await template_of(source).render_async(messages[:1])


@pytest.mark.parametrize(
    ("name", "reads_lists"),
    [
        ("GLM-4.6", True),
        ("Kimi-K2-Instruct", True),
        ("MiniMax-M2", True),
        ("Mistral-Small-3.2-24B-Instruct-2506", True),
        ("Qwen3.5-4B", True),
        ("google-gemma-4-31B-it", True),
        ("ibm-granite-granite-4.1", True),
        ("Qwen-Qwen3-0.6B", False),
        ("deepseek-ai-DeepSeek-V3.1", False),
        ("meta-llama-Llama-3.1-8B-Instruct", False),
        ("openai-gpt-oss-120b", False),
    ],
)
async def test_published_templates_write_parts_as_transformers_does(
    assets: Path, name: str, reads_lists: bool
) -> None:
    source = (assets / "chat-templates" / f"{name}.jinja").read_text(encoding="utf-8")
    given = [{"role": "user", "content": text_parts(["Hi", "you"])}]
    written = given if reads_lists else [{"role": "user", "content": "Hi\nyou"}]
    [expected], _ = render_jinja_template(
        [written], chat_template=source, add_generation_prompt=True
    )
    assert await template_of(source).render_async(given) == expected


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
INPUT = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PARTS}]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": PARTS}]},
    "/tokenize": {"messages": [{"role": "user", "content": PARTS}]},
    "/v1/responses": {"input": [{"role": "user", "content": INPUT}]},
    "/v1/messages": {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("source", "written"), [(LOOP, "<user>a b </s>"), (TEXT, "<user>a\nb</s>")]
)
async def test_every_api_passes_parts_on(
    tmp_path: Path, says: Callable[[str], Script], path: str, source: str, written: str
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(source)
    async with serving(FakeEngine(says("x")), folder) as served:
        response = await served.http.post(path, json=BODIES[path])
        assert response.status_code == 200, response.text
        requests = served.engine.requests
        body = response.json()
        ids = requests[-1].prompt if requests else body.get("tokens") or body["token_ids"]
        assert "content_not_shown" not in [warning["code"] for warning in body.get("lint", ())]
        # The last token is `</s>`, which the template writes.
        text = served.app.state.penstock.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == written
