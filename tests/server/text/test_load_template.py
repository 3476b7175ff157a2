"""The chat templates of a folder, and which of them renders a chat, as in transformers."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.checkpoint.gguf.tokenizer import tokenizer_settings
from engine.errors import ConfigError
from server.text.chat_template import TemplateError
from server.text.load_template import MAX_BYTES, MAX_TEMPLATES, load_template, read_templates
from tests.support.tiny_tokenizer import write_tokenizer

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEFAULT, TOOLS, OTHER = "D {{ tools }}", "T {{ tools }}", "O {{ tools }}"
LIST = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOLS}]
OTHERS = [{"name": name, "template": OTHER} for name in ("default", "tool_use")]
MORE = "additional_chat_templates"
# The key chat_template of tokenizer_config.json, and files of templates.
FOLDERS: dict[str, tuple[Any, dict[str, str]]] = {
    "one": (DEFAULT, {}),
    "a list": (LIST, {}),
    "a list with another": ([*LIST, {"name": "rag", "template": OTHER}], {}),
    "an object": ({"default": DEFAULT, "tool_use": TOOLS}, {}),
    "a list without a default": (LIST[1:], {}),
    "files": (None, {"chat_template.jinja": DEFAULT, f"{MORE}/tool_use.jinja": TOOLS}),
    "files before a list": (
        OTHERS,
        {"chat_template.jinja": DEFAULT, f"{MORE}/tool_use.jinja": TOOLS},
    ),
    "a file before a list": (OTHERS, {"chat_template.jinja": DEFAULT}),
    "a file for another use": (
        None,
        {"chat_template.jinja": DEFAULT, f"{MORE}/rag.jinja": OTHER},
    ),
    "a default in the folder": (
        None,
        {"chat_template.jinja": OTHER, f"{MORE}/default.jinja": DEFAULT},
    ),
}


def write(folder: Path, name: str) -> Path:
    found, files = FOLDERS[name]
    write_tokenizer(folder, settings={} if found is None else {"chat_template": found})
    for file, source in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(source)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_render_with_and_without_tools_equals_transformers(
    tmp_path: Path, name: str, tools: list[Any] | None
) -> None:
    folder = write(tmp_path, name)
    template = load_template(folder, None)
    assert template is not None
    arguments = {} if tools is None else {"tools": tools}
    try:
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [USER], tools=tools, tokenize=False
        )
    except ValueError:  # no template for such a chat
        with pytest.raises(TemplateError, match="for chats with tools only"):
            template.render([USER], **arguments)
        return
    assert template.render([USER], **arguments) == expected


def test_render_with_tools_continues_a_message_with_the_same_template(tmp_path: Path) -> None:
    source = "T{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": {"default": "D", "tool_use": source}})
    )
    template = load_template(tmp_path, None)
    assert template is not None
    text = template.render([USER], tools=[TOOL], continue_final_message=True)
    assert text == "T<x"


def test_override_is_used_with_tools_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "a list")
    (tmp_path / "mine.jinja").write_text("mine")
    template = load_template(folder, tmp_path / "mine.jinja")
    assert template is not None
    assert template.render([USER], tools=[TOOL]) == "mine"
    assert not template.has_tool_use


def test_variables_and_sources_are_those_of_each_template(tmp_path: Path) -> None:
    found = {"default": "{{ thinking }}", "tool_use": "{{ tools }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    template = load_template(tmp_path, None)
    assert template is not None
    assert template.variables == {"thinking"}
    assert template.for_tools.variables == {"tools"}
    assert template.sources == "{{ thinking }}{{ tools }}"


def test_tool_use_file_with_a_default_in_tokenizer_config_has_both(tmp_path: Path) -> None:
    """transformers then has no default, and raises an error for chats without tools."""
    (tmp_path / MORE).mkdir()
    (tmp_path / MORE / "tool_use.jinja").write_text(TOOLS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": DEFAULT}))
    found = read_templates(tmp_path)
    assert {name: file.source for name, file in found.items()} == {
        "default": DEFAULT,
        "tool_use": TOOLS,
    }


@pytest.mark.parametrize(
    "names", [("", ".tool_use"), (".tool_use", "", ".rag"), (".default", ".tool_use")]
)
def test_templates_of_a_gguf_file_are_chosen_by_their_names(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    texts = {"": DEFAULT, ".default": DEFAULT, ".tool_use": TOOLS, ".rag": OTHER}
    tokens = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"]}
    named = {f"tokenizer.chat_template{name}": texts[name] for name in names}
    settings = tokenizer_settings({**tokens, **named}, 9)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_template(tmp_path, None)
    assert template is not None
    assert template.render([USER]) == "D None"
    assert template.render([USER], tools=[TOOL]).startswith("T [{")


def test_broken_tool_use_template_raises_and_names_its_file(tmp_path: Path) -> None:
    folder = write(tmp_path, "files")
    (folder / MORE / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"additional_chat_templates/tool_use\.jinja is broken"):
        load_template(folder, None)


def test_templates_for_other_uses_only_raise(tmp_path: Path) -> None:
    (tmp_path / MORE).mkdir()
    (tmp_path / MORE / "rag.jinja").write_text("x")
    with pytest.raises(ConfigError, match=r"the chat templates \['rag'\]; one of them must"):
        load_template(tmp_path, None)


LARGE = MAX_BYTES + 1
TOO_LARGE: dict[str, tuple[str, Any]] = {
    "chat_template.jinja": ("chat_template.jinja", None),
    "a file in the folder": (f"{MORE}/rag.jinja", None),
    "chat_template.json": ("chat_template.json", {"chat_template": "x" * LARGE}),
    "one of an object": ("chat_template.json", {"chat_template": {"rag": "x" * LARGE}}),
    "settings": (
        "tokenizer_config.json",
        {"chat_template": [*LIST, {"name": "r", "template": "x" * LARGE}]},
    ),
}


@pytest.mark.parametrize(("name", "content"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_template_above_the_limit_is_refused_with_its_file_and_size(
    tmp_path: Path, name: str, content: Any
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("" if content is None else json.dumps(content))
    if content is None:
        os.truncate(file, LARGE)
    with pytest.raises(ConfigError, match=f"{LARGE} .*; at most {MAX_BYTES} are read") as refused:
        read_templates(tmp_path)
    assert str(file) in str(refused.value)
    assert len(str(refused.value)) < 500


def test_sparse_template_of_gigabytes_given_by_a_flag_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "given.jinja"
    file.touch()
    os.truncate(file, 6 << 30)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=f"{file}: it has {6 << 30} bytes; at most {MAX_BYTES}"):
        load_template(tmp_path, file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_BYTES


def test_endless_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"it has more than {MAX_BYTES} bytes"):
        load_template(tmp_path, Path("/dev/zero"))


def test_template_of_the_largest_size_is_read(tmp_path: Path) -> None:
    source = "é" * (MAX_BYTES // 2 - 1) + "\r\n"
    (tmp_path / "chat_template.jinja").write_bytes(source.encode())
    assert read_templates(tmp_path)["default"].source == source.replace("\r", "")


def test_too_many_templates_are_refused_with_their_number(tmp_path: Path) -> None:
    (tmp_path / MORE).mkdir()
    for number in range(MAX_TEMPLATES + 1):
        (tmp_path / MORE / f"{number}.jinja").touch()
    with pytest.raises(ConfigError, match=f"{MORE} has 65 chat templates; at most 64 are read"):
        read_templates(tmp_path)


def test_template_that_blocks_is_refused(tmp_path: Path) -> None:
    (tmp_path / MORE).mkdir()
    os.mkfifo(tmp_path / MORE / "rag.jinja")
    with pytest.raises(ConfigError, match=r"rag\.jinja is not a file"):
        read_templates(tmp_path)
