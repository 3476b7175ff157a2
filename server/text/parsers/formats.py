"""How models write their reasoning and their tool calls: data for the one parser and its grammars.

Each text is as the chat templates of these models render it. The parser ignores white space at its
ends; a grammar writes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

IdStyle = Literal["call", "short", "indexed"]


@dataclass(frozen=True)
class Reasoning:
    """The marks around the text that a model thinks before its answer."""

    open: str
    close: str
    begins_answer: bool = False  # an answer begins with reasoning, also without `open`


@dataclass(frozen=True)
class JsonCall:
    """{"name": "f", "arguments": {…}}; with `is_list`, an array of such objects."""

    name: str = "name"  # key of the function's name; "": the name is itself the key of the rest
    arguments: str = "arguments"
    id: str | None = None  # key of the call's id, which comes first
    is_list: bool = False


@dataclass(frozen=True)
class NamedCall:
    """A name, a separator and the arguments as JSON."""

    separator: str
    # Of the text before the separator, stripped; its groups are `name` and perhaps `id`.
    pattern: str = r"(?P<name>\S+)"
    written: str = "{name}"  # what a model writes there
    inside: tuple[str, ...] = ()  # tokens in that text


@dataclass(frozen=True)
class TaggedCall:
    """A name, and each argument as a key and a value between tags. Texts have no quotes."""

    name_end: str
    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""  # after `key_close`, if other text may stand between them
    # `key_close` of values that are JSON, if it tells them from texts; otherwise the schema tells.
    json_key_close: str = ""


@dataclass(frozen=True)
class LinesCall:
    """A name, and each argument as a line: key: value. Texts have no quotes."""

    name_end: str
    key_end: str = ":"
    line_end: str = "\n"


@dataclass(frozen=True)
class PythonCall:
    """[f(a=1, b="x"), g()]"""


@dataclass(frozen=True)
class GemmaCall:
    """f{a:1,b:<|"|>x<|"|>}"""

    quote: str = '<|"|>'


Body = JsonCall | NamedCall | TaggedCall | LinesCall | PythonCall | GemmaCall


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls."""

    name: str
    body: Body
    open: str = ""  # before each call
    close: str = ""  # after each call
    separator: str = ""  # between two calls
    section_open: str = ""  # before all calls
    section_close: str = ""  # after all calls
    # The models often leave out `section_open`.
    is_section_optional: bool = False
    id_style: IdStyle = "call"
    prefix: str = ""  # may stand before the first call of a format without marks

    @property
    def is_bare(self) -> bool:
        """Whether nothing marks the beginning of a call, which then begins the answer."""
        return not self.open and not self.section_open


@dataclass(frozen=True)
class ChannelFormat:
    """Harmony: messages with headers that name a channel and perhaps a function.

    Source: the OpenAI harmony response format (github.com/openai/harmony, docs/format.md).
    """

    name: str = "harmony"
    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call_end: str = "<|call|>"
    final_end: str = "<|return|>"
    constrain: str = "<|constrain|>"
    id_style: IdStyle = "call"
    is_bare: bool = field(default=False, init=False)


AnyCallFormat = CallFormat | ChannelFormat


@dataclass(frozen=True)
class OtherMarks:
    """Marks of a model's answers that are not in its formats."""

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other texts for a mark
    dropped: tuple[str, ...] = ()  # around the content, such as the end of the turn


NO_OTHER_MARKS = OtherMarks()

REASONING_BY_NAME = {
    "think": Reasoning("<think>\n", "\n</think>\n\n"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "cohere": Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Reasoning("<|channel>thought\n", "<channel|>"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
    "apertus": Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar_open": Reasoning("<|think|>", "<|end|><|begin|>assistant<|content|>"),
    "apriel": Reasoning("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    "granite": Reasoning("<reasoning>", "</reasoning>"),
    "gemma3n": Reasoning("<unused94>thought\n", "<unused95>"),
}
REASONING = tuple(REASONING_BY_NAME.values())


def _functions(section_open: str, section_close: str, newline: str = "\n") -> CallFormat:
    """<function=f><parameter=key>value</parameter></function>, the format of Qwen3-Coder."""
    return CallFormat(
        "qwen3_coder" if section_open.startswith("<tool_call>") else "seed_oss",
        TaggedCall(">\n", "<parameter=", f">{newline}", f"{newline}</parameter>\n"),
        open="<function=",
        close="</function>",
        separator=f"{section_close}\n{section_open}",
        section_open=section_open,
        section_close=section_close,
        is_section_optional=True,
    )


HERMES = CallFormat(
    "hermes", JsonCall(), open="<tool_call>\n", close="\n</tool_call>", separator="\n"
)
# The order matters only for templates that show no call: the first whose marks they name is taken.
CALL_FORMATS: tuple[AnyCallFormat, ...] = (
    _functions("<seed:tool_call>\n", "\n</seed:tool_call>", newline=""),
    _functions("<tool_call>\n", "\n</tool_call>"),
    HERMES,
    CallFormat(
        "glm",
        TaggedCall("", "<arg_key>", "</arg_key>\n", "</arg_value>\n", "<arg_value>"),
        open="<tool_call>",
        close="</tool_call>",
        separator="\n",
    ),
    ChannelFormat(),
    CallFormat("gemma4", GemmaCall(), open="<|tool_call>call:", close="<tool_call|>"),
    CallFormat(
        "functiongemma",
        GemmaCall("<escape>"),
        open="<start_function_call>call:",
        close="<end_function_call>",
    ),
    CallFormat(
        "mistral",
        NamedCall(
            "[ARGS]",
            r"(?P<name>\S+?)(\[CALL_ID\](?P<id>.+))?",
            inside=("[CALL_ID]",),
        ),
        open="[TOOL_CALLS]",
        id_style="short",
    ),
    CallFormat(
        "mistral_list", JsonCall(is_list=True), section_open="[TOOL_CALLS]", id_style="short"
    ),
    CallFormat(
        "deepseek_r1",
        NamedCall(
            "\n```json\n",
            r"function<｜tool▁sep｜>(?P<name>\S+)",
            "function<｜tool▁sep｜>{name}",
            ("<｜tool▁sep｜>",),
        ),
        open="<｜tool▁call▁begin｜>",
        close="\n```<｜tool▁call▁end｜>",
        separator="\n",
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v3_1",
        NamedCall("<｜tool▁sep｜>"),
        open="<｜tool▁call▁begin｜>",
        close="<｜tool▁call▁end｜>",
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
    ),
    CallFormat(
        "deepseek_v3_2",
        TaggedCall(
            '">\n',
            '<｜DSML｜parameter name="',
            '" string="true">',
            "</｜DSML｜parameter>\n",
            json_key_close='" string="false">',
        ),
        open='<｜DSML｜invoke name="',
        close="</｜DSML｜invoke>\n",
        section_open="<｜DSML｜function_calls>\n",
        section_close="</｜DSML｜function_calls>",
    ),
    CallFormat(
        "kimi_k2",
        NamedCall(
            "<|tool_call_argument_begin|>",
            r"(?P<id>(functions\.)?(?P<name>\S+?)(:\d+)?)",
            "functions.{name}:{index}",
        ),
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        section_open="<|tool_calls_section_begin|>",
        section_close="<|tool_calls_section_end|>",
        id_style="indexed",
    ),
    CallFormat(
        "minimax_m2",
        TaggedCall('">\n', '<parameter name="', '">', "</parameter>\n"),
        open='<invoke name="',
        close="</invoke>\n",
        section_open="<minimax:tool_call>\n",
        section_close="</minimax:tool_call>",
    ),
    CallFormat(
        "lfm2",
        PythonCall(),
        section_open="<|tool_call_start|>",
        section_close="<|tool_call_end|>",
    ),
    CallFormat(
        "cohere_command",
        JsonCall("tool_name", "parameters", "tool_call_id", is_list=True),
        section_open="<|START_ACTION|>",
        section_close="<|END_ACTION|>",
    ),
    CallFormat(
        "cohere_command_r",
        JsonCall("tool_name", "parameters", is_list=True),
        section_open="Action: ```json\n",
        section_close="```",
    ),
    CallFormat(
        "solar_open",
        NamedCall(
            "<|tool_call:args|>",
            r"(?P<id>.*?)<\|tool_call:name\|>(?P<name>\S+)",
            "call_{index}<|tool_call:name|>{name}",
            ("<|tool_call:name|>",),
        ),
        open="<|tool_call:begin|>",
        close="<|tool_call:end|>",
        section_open="<|tool_calls|>",
        section_close="<|calls|>",
    ),
    CallFormat("functionary_v3_1", NamedCall(">"), open="<function=", close="</function>"),
    CallFormat(
        "nemotron",
        JsonCall(is_list=True),
        section_open="<TOOLCALL>",
        section_close="</TOOLCALL>",
    ),
    CallFormat(
        "apriel",
        JsonCall(is_list=True),
        section_open="<tool_calls>",
        section_close="</tool_calls>",
    ),
    CallFormat(
        "apertus",
        JsonCall(name="", is_list=True),
        section_open="<|tools_prefix|>",
        section_close="<|tools_suffix|>",
    ),
    CallFormat("granite", JsonCall(is_list=True), section_open="<|tool_call|>"),
    CallFormat("gigachat", JsonCall(), open="<|function_call|>"),
    CallFormat("firefunction", JsonCall(is_list=True), section_open=" functools"),
    CallFormat(
        "llama3_json",
        JsonCall(arguments="parameters"),
        separator="; ",
        prefix="<|python_tag|>",
    ),
    CallFormat("pythonic", PythonCall()),
)
BY_NAME = {format.name: format for format in CALL_FORMATS}
