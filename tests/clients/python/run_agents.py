"""The cells of openai-agents, on /v1/responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
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

set_tracing_disabled(True)
TARGET = target()


class City(BaseModel):
    city: str = Field(max_length=20)


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"21 degrees in {city}"


def agent(
    key: str = TARGET.key,
    url: str = TARGET.base_url,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> Agent:
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    model = OpenAIResponsesModel("demo", client)
    values = {"temperature": 0, "max_tokens": 100, **(settings or {})}
    return Agent("agent", model=model, model_settings=ModelSettings(**values), **fields)


def weather_agent() -> Agent:
    """Return an agent that ends with its first call."""
    return agent(
        settings={"tool_choice": "required"},
        tools=[get_weather],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["get_weather"]),
    )


def check_one_call(items: list[Any]) -> None:
    [call] = [item.raw_item for item in items if item.type == "tool_call_item"]
    check_call(call.name, call.arguments)


async def text_deltas(result: Any) -> Any:
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            yield event.data.delta


async def chat() -> None:
    assert "Paris" in (await Runner.run(agent(), QUESTION)).final_output


async def stream() -> None:
    check_pieces([part async for part in text_deltas(Runner.run_streamed(agent(), QUESTION))])


async def usage() -> None:
    whole = (await Runner.run(agent(), QUESTION)).context_wrapper.usage
    check_usage(whole.input_tokens, whole.output_tokens)
    result = Runner.run_streamed(agent(), QUESTION)
    _ = [part async for part in text_deltas(result)]
    assert result.context_wrapper.usage.total_tokens == whole.total_tokens


async def tools() -> None:
    result = await Runner.run(weather_agent(), WEATHER)
    check_one_call(result.new_items)
    assert result.final_output.startswith("21 degrees"), result.final_output
    follow = agent(tools=[get_weather])
    assert (await Runner.run(follow, result.to_input_list(), max_turns=5)).final_output


async def tools_streamed() -> None:
    result = Runner.run_streamed(weather_agent(), WEATHER)
    kinds = [e.data.type async for e in result.stream_events() if e.type == "raw_response_event"]
    assert kinds.count("response.function_call_arguments.delta") > 1
    check_one_call(result.new_items)


async def json_schema() -> None:
    result = await Runner.run(agent(output_type=City), QUESTION)
    assert isinstance(result.final_output, City)


async def bad_request() -> None:
    hot = agent(settings={"temperature": TOO_HOT})
    check_error(await raised_async(lambda: Runner.run(hot, QUESTION)), 400, "temperature")


async def wrong_key() -> None:
    check_error(await raised_async(lambda: Runner.run(agent("wrong"), QUESTION)), 401)


async def rate_limit() -> None:
    limited = agent(TARGET.limited_key)
    await Runner.run(limited, QUESTION)
    check_error(await raised_async(lambda: Runner.run(limited, QUESTION)), 429)


async def abort() -> None:
    endless = agent(url=TARGET.endless_base_url, settings={"max_tokens": 1000})
    result = Runner.run_streamed(endless, QUESTION)
    async for _ in text_deltas(result):
        break
    result.cancel()
    async for _ in result.stream_events():
        pass
    TARGET.check_aborted()


async def broken_stream() -> None:
    endless = agent(url=TARGET.endless_base_url, settings={"max_tokens": 1000})
    dead = False
    async for _ in text_deltas(Runner.run_streamed(endless, QUESTION)):
        if not dead:
            TARGET.kill_engine()
        dead = True


async def stream_error() -> None:
    error = await raised_async(broken_stream)
    assert "engine" in str(error), error


run(globals(), several="the API has no n")
