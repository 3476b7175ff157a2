"""The cells of pydantic-ai."""

from __future__ import annotations

from typing import Any

from cells import (
    QUESTION,
    TOO_HOT,
    WEATHER,
    check_call,
    check_error,
    check_pieces,
    check_usage,
    raised_async,
    run,
    target,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

TARGET = target()


class City(BaseModel):
    city: str = Field(max_length=20)


def agent(
    key: str = TARGET.key, url: str = TARGET.base_url, output: Any = str, **settings: Any
) -> Agent[None, Any]:
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100, **settings}
    return Agent(model, output_type=output, model_settings=fields, retries=0)


# An output by tool makes the client ask for tool_choice "required".
WEATHER_OUTPUT = ToolOutput(City, name="get_weather")


def calls(messages: list[Any]) -> list[ToolCallPart]:
    return [
        part for message in messages for part in message.parts if isinstance(part, ToolCallPart)
    ]


async def chat() -> None:
    assert "Paris" in (await agent().run(QUESTION)).output


async def stream() -> None:
    async with agent().run_stream(QUESTION) as result:
        check_pieces([part async for part in result.stream_text(delta=True, debounce_by=None)])


async def usage() -> None:
    whole = (await agent().run(QUESTION)).usage
    check_usage(whole.input_tokens, whole.output_tokens)
    async with agent().run_stream(QUESTION) as result:
        await result.get_output()
        assert result.usage.output_tokens == whole.output_tokens


async def tools() -> None:
    result = await agent(output=WEATHER_OUTPUT).run(WEATHER)
    [call] = calls(result.all_messages())
    check_call(call.tool_name, call.args)


async def tools_streamed() -> None:
    async with agent(output=WEATHER_OUTPUT).run_stream(WEATHER) as result:
        parts = [part async for part in result.stream_output(debounce_by=None)]
        assert isinstance(parts[-1], City)
        [call] = calls(result.all_messages())
    check_call(call.tool_name, call.args)


async def json_schema() -> None:
    result = await agent(output=NativeOutput(City)).run(QUESTION)
    assert isinstance(result.output, City)


async def bad_request() -> None:
    error = await raised_async(lambda: agent(temperature=TOO_HOT).run(QUESTION))
    check_error(error, 400, "temperature")


async def wrong_key() -> None:
    check_error(await raised_async(lambda: agent("wrong").run(QUESTION)), 401)


async def rate_limit() -> None:
    limited = agent(TARGET.limited_key)
    await limited.run(QUESTION)
    check_error(await raised_async(lambda: limited.run(QUESTION)), 429)


async def abort() -> None:
    endless = agent(url=TARGET.endless_base_url, max_tokens=1000)
    async with endless.run_stream(QUESTION) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            break
    TARGET.check_aborted()


async def broken_stream() -> None:
    endless = agent(url=TARGET.endless_base_url, max_tokens=1000)
    async with endless.run_stream(QUESTION) as result:
        dead = False
        async for _ in result.stream_text(delta=True, debounce_by=None):
            if not dead:
                TARGET.kill_engine()
            dead = True


async def stream_error() -> None:
    error = await raised_async(broken_stream)
    assert "engine" in str(error), error


run(globals(), several="the client has no n")
