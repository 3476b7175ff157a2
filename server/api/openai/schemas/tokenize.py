"""Bodies of /tokenize and /detokenize, as in vLLM and in llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr, model_validator

from server.api.openai.schemas.chat import ONE_ENDING, Messages, TemplateArguments, check_ending
from server.api.openai.schemas.fields import LIST, MAX_TOKEN_IDS, TEXT, TRUE, TokenId, having, never
from server.api.openai.schemas.tools import ToolChoice, Tools, tool_use
from server.generation.chat_prompt import Chat
from server.http.body import Body, Text, failure
from server.text.tools import NO_TOOLS, ToolUse


class TokenizeBody(Body):
    """A prompt or messages to tokenise.

    `add_special_tokens` defaults to true for a prompt. For messages it defaults to false, because
    the chat template writes special tokens itself, and for llama.cpp's `content` as there.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"parse_special": (True,)}

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(prompt=TEXT), having(messages=LIST), having(content=TEXT)]},
                never(prompt=TEXT, messages=LIST),
                never(prompt=TEXT, content=TEXT),
                never(content=TEXT, messages=LIST),
                never(content=TEXT, continue_final_message=TRUE),
                never(content=TEXT, tools={"type": "array", "minItems": 1}),
                never(prompt=TEXT, continue_final_message=TRUE),
                never(prompt=TEXT, tools={"type": "array", "minItems": 1}),
                ONE_ENDING,
            ]
        }
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "add_generation_prompt": True,
        "add_special_tokens": None,  # depends on the kind of prompt
    }

    prompt: Text | None = None
    """A text; either this or `messages`."""
    content: Text | None = None
    """llama.cpp's name of `prompt`, without special tokens by default."""
    messages: Messages | None = None
    """A conversation for the chat template."""
    add_special_tokens: bool | None = Field(
        None, validation_alias=AliasChoices("add_special_tokens", "add_special")
    )
    """Add special tokens; default: true for a prompt, false for messages and content."""
    return_token_strs: bool | None = None
    """Return the tokens as the vocabulary has them, too."""
    with_pieces: bool | None = None
    """Return each token with its text, or its bytes if they are no whole characters."""
    tools: Tools | None = None
    """Functions that the model may call; needs `messages`."""
    tool_choice: ToolChoice | None = None
    """`none` hides the tools."""
    add_generation_prompt: bool | None = None
    """Open the turn of the answer."""
    continue_final_message: bool | None = None
    """Leave the last message open; needs `messages`."""
    chat_template_kwargs: TemplateArguments | None = None
    """Variables of the chat template; 16 KiB of JSON at most."""

    _tool_use: ToolUse = PrivateAttr(NO_TOOLS)

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        given = [self.prompt, self.content, self.messages]
        if given.count(None) != len(given) - 1:
            names = "prompt, content and messages"
            raise failure("invalid", f"exactly one of {names} is required", "prompt")
        if self.text is not None and self.continue_final_message:
            raise failure("invalid", "needs messages, not a prompt", "continue_final_message")
        if self.text is not None and self.tools:
            raise failure("invalid", "needs messages, not a prompt", "tools")
        check_ending(self)
        self._tool_use = tool_use(self.tools, self.tool_choice, parallel=True)
        return self

    @property
    def text(self) -> str | None:
        """The text to tokenise; None if there are messages."""
        return self.content if self.prompt is None else self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        """Whether special tokens are added to the text."""
        if self.add_special_tokens is None:
            return self.content is None
        return self.add_special_tokens

    def chat(self) -> Chat:
        """Return the conversation for the model's template. Takes long for a long body."""
        arguments: dict[str, Any] = {}
        if self.chat_template_kwargs is not None:
            arguments = dict(self.chat_template_kwargs)
        return Chat(
            messages=[message.for_template() for message in self.messages or ()],
            arguments=arguments,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=self.add_special_tokens,
            tool_use=self._tool_use,
        )


class DetokenizeBody(Body):
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
    """Token ids."""
    return_texts: bool | None = None
    """Return the text of each token, too; their join is the text of all."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text, as answers do."""
