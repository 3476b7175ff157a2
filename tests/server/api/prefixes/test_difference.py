"""The first block that differs, and what it holds, after random edits of conversations.

The expected loss is counted in the tokens of both prompts, without the hashes of the records.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from server.api.anthropic.schemas import MessagesBody
from server.api.prefixes import record
from server.api.prefixes.difference import Difference, RenderedPrompt, first_difference
from server.api.prefixes.record import prompt_record
from server.generation.chat_prompt import Chat, chat_prompt
from server.state import AppState
from server.text import template_sandbox
from tests.support.fake_engine import FakeEngine
from tests.support.render_here import RenderHere
from tests.support.rig import serving

SIZE = 16
CALLS = (
    "{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
DATE = "Today is {{ strftime_now('%d %B %Y') }}.\n"
LOOP = (
    "<|{{ m.role }}|>{{ m.content if m.content else '' }}{% if m.tool_calls %}"
    f"{CALLS}{{% endif %}}<|end|>\n"
)
SYSTEM = "{% if m.role == 'system' %}{{ m.content | trim }}\n{% endif %}"
THINK = "{% if enable_thinking is defined and not enable_thinking %}No thoughts.\n{% endif %}"
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OTHERS = "{% for m in messages if m.role != 'system' %}" + LOOP + "{% endfor %}"
LEADING = "{% for m in messages[:1] %}" + SYSTEM + "{% endfor %}"
TEMPLATES = {
    "system first": LEADING + TOOLS + THINK + DATE + OTHERS + END,
    "tools first": TOOLS + DATE + LEADING + OTHERS + THINK + END,
    "date first": DATE + THINK + LEADING + TOOLS + OTHERS + END,
    "tools before the last message": LEADING
    + DATE
    + "{% for m in messages if m.role != 'system' %}{% if loop.last %}"
    + TOOLS
    + "{% endif %}"
    + LOOP
    + "{% endfor %}"
    + THINK
    + END,
}
WORDS = ["river", "mill", "boat", "stone", "bridge", "water", "hill", "tower", "lamp", "old"]
Json = dict[str, Any]


class RenderInThread(RenderHere):
    async def in_thread(self, work: Callable[[], str]) -> str:
        return work()


@pytest.fixture(params=TEMPLATES)
async def state(
    request: pytest.FixtureRequest, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AppState]:
    monkeypatch.setattr("server.text.load_template.RenderPool", RenderInThread)
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATES[request.param]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    async with serving(FakeEngine(lambda request: [0]), folder) as served:
        yield served.app.state.penstock


@pytest.fixture
def set_date(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 11, cls.day)

    def change(day: int) -> None:
        Clock.day = day

    monkeypatch.setattr(template_sandbox, "datetime", Clock)
    monkeypatch.setattr(record, "datetime", Clock)
    return change


def text(most: int = 30) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(2, most)))


def conversation(turns: int | None = None) -> Json:
    """Return a body of /v1/messages, with a call and its result in some turns."""
    tools = [
        {"name": f"{random.choice(WORDS)}_{index}", "description": text(9), "input_schema": {}}
        for index in range(3)
    ]
    messages: list[Json] = []
    for number in range(turns or random.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        if number % 2:
            use = {"type": "tool_use", "id": "c1", "name": "mill_0", "input": {"at": text(5)}}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": text()}
            messages.append({"role": "assistant", "content": [use]})
            messages.append({"role": "user", "content": [result]})
        messages.append({"role": "assistant", "content": text()})
    messages.append({"role": "user", "content": text()})
    return {"system": text(), "tools": tools, "messages": messages, "max_tokens": 1}


def edit_tools(body: Json) -> str:
    random.shuffle(body["tools"])
    body["tools"].append(body["tools"].pop(0))
    if random.random() < 0.5:
        random.choice(body["tools"])["description"] += " again"
    return "tools"


def edit_system(body: Json) -> str:
    said = body["system"]
    place = random.randrange(1, len(said))
    body["system"] = f"{said[:place]} {said[place:]}"
    return "system"


def edit_message(body: Json) -> str:
    index = random.randrange(len(body["messages"]))
    message = body["messages"][index]
    if isinstance(message["content"], str):
        place = random.randrange(len(message["content"]))
        message["content"] = f"{message['content'][:place]}z{message['content'][place:]}"
    elif message["role"] == "assistant":
        message["content"][0]["input"]["at"] += "z"
    else:
        message["content"][0]["content"] += "z"
    return str(index + 1)  # behind the system message


EDITS = (edit_tools, edit_system, edit_message)


async def rendered(state: AppState, body: Json) -> tuple[RenderedPrompt, list[int]]:
    chat: Chat = MessagesBody.model_validate(body).chat()
    prompt = await chat_prompt(state, chat)
    made = prompt_record(chat, prompt.ids, SIZE, salt="", adapter=0)
    return RenderedPrompt(chat, prompt.text, False, made), prompt.ids


def num_equal(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(bool, (a == b for a, b in zip(one, other, strict=False)))))


def check_loss(found: Difference | None, before: list[int], after: list[int]) -> bool:
    """Check the block and the lost tokens. Return whether blocks are lost."""
    equal = num_equal(before, after) // SIZE
    lost = min(len(before) // SIZE, (len(after) - 1) // SIZE) - equal
    if lost <= 0:
        assert found is None
        return False
    assert found is not None
    assert (found.block, found.reusable_tokens, found.lost_tokens) == (
        equal,
        equal * SIZE,
        lost * SIZE,
    )
    return True


@pytest.mark.parametrize("edit", EDITS)
async def test_difference_after_one_edit_names_what_was_edited(
    state: AppState, edit: Callable[[Json], str], set_date: Callable[[int], None]
) -> None:
    named = 0
    for _ in range(15):
        body = conversation()
        earlier, before = await rendered(state, body)
        changed = copy.deepcopy(body)
        planted = edit(changed)
        prompt, after = await rendered(state, changed)
        found = await first_difference(state, prompt, earlier.record)
        if check_loss(found, before, after):
            assert found is not None
            assert str(found.held) == planted
            named += 1
    assert named


async def test_difference_after_a_new_date_or_option_names_the_template(
    state: AppState, set_date: Callable[[int], None]
) -> None:
    named = 0
    for number in range(10):
        body = conversation()
        set_date(1)
        earlier, before = await rendered(state, body)
        changed = body | {"thinking": {"type": "disabled"}} if number % 2 else body
        set_date(1 if number % 2 else 2)
        prompt, after = await rendered(state, changed)
        found = await first_difference(state, prompt, earlier.record)
        if check_loss(found, before, after):
            assert found is not None
            assert found.held == "template"
            assert found.changed_thinking == bool(number % 2)
            named += 1
    assert named


async def test_difference_after_several_edits_names_the_one_that_comes_first(
    state: AppState, set_date: Callable[[int], None]
) -> None:
    named = 0
    for _ in range(15):
        body = conversation()
        set_date(1)
        earlier, before = await rendered(state, body)
        both = copy.deepcopy(body)
        first: dict[str, int] = {}  # the first different token of each edit alone
        for edit in random.sample(EDITS, 2):
            one = copy.deepcopy(body)
            seed = random.random()
            random.seed(seed)
            planted = edit(one)
            random.seed(seed)
            edit(both)
            first[planted] = num_equal(before, (await rendered(state, one))[1])
        set_date(2)
        first["template"] = num_equal(before, (await rendered(state, body))[1])
        prompt, after = await rendered(state, both)
        found = await first_difference(state, prompt, earlier.record)
        if check_loss(found, before, after):
            assert found is not None
            block = min(first.values()) // SIZE
            assert str(found.held) in {part for part, at in first.items() if at // SIZE == block}
            named += 1
    assert named


@pytest.mark.parametrize("inserts", [True, False])
async def test_difference_after_messages_come_or_go_names_the_first_other_one(
    state: AppState, inserts: bool, set_date: Callable[[int], None]
) -> None:
    """Also where the template writes the tools elsewhere then."""
    for _ in range(8):
        body = conversation()
        earlier, before = await rendered(state, body)
        changed = copy.deepcopy(body)
        messages = changed["messages"]
        if inserts:
            pair = [{"role": role, "content": text(4)} for role in ("user", "assistant")]
            messages[-1:-1] = pair
        else:
            del messages[random.choice([0, 1]) : -1]
        prompt, after = await rendered(state, changed)
        found = await first_difference(state, prompt, earlier.record)
        if check_loss(found, before, after):
            assert found is not None
            same = [
                a == b for a, b in zip(earlier.chat.messages, prompt.chat.messages, strict=False)
            ]
            assert found.held == len([*takewhile(bool, same)])


async def test_difference_of_appended_messages_is_none(state: AppState) -> None:
    body = conversation()
    earlier, before = await rendered(state, body)
    answer = {"role": "assistant", "content": text()}
    more = body | {"messages": [*body["messages"], answer, {"role": "user", "content": text()}]}
    prompt, after = await rendered(state, more)
    found = await first_difference(state, prompt, earlier.record)
    if check_loss(found, before, after):  # the tools moved to the new last message
        assert found is not None
        assert found.held == "template"


async def test_difference_of_removed_parts_names_them(state: AppState) -> None:
    body = conversation(3) | {"system": text(200)}
    earlier, before = await rendered(state, body)
    for planted, changed in {
        "tools": body | {"tools": None},
        "system": {name: value for name, value in body.items() if name != "system"},
        "1": body | {"messages": body["messages"][2:]},
    }.items():
        prompt, after = await rendered(state, changed)
        found = await first_difference(state, prompt, earlier.record)
        if check_loss(found, before, after):
            assert found is not None
            assert str(found.held) == planted
