// The cells of openai for Node.

import assert from "node:assert";
import OpenAI from "openai";
import {
  checkAborted,
  checkCall,
  checkPieces,
  citySchema,
  killEngine,
  question,
  run,
  target,
  thrown,
  tooHot,
  weather,
} from "./cells.mjs";

const chatFields = {
  model: "demo",
  temperature: 0,
  max_tokens: 100,
  messages: [{ role: "user", content: question }],
};
const tool = {
  type: "function",
  function: { name: "get_weather", description: "The weather.", parameters: citySchema },
};
const toolFields = {
  ...chatFields,
  messages: [{ role: "user", content: weather }],
  tools: [tool],
  tool_choice: "required",
};
const longFields = { ...chatFields, max_tokens: 1000, stream: true };

function client(apiKey = target.key, url = target.url) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
}

async function chat() {
  const answer = await client().chat.completions.create(chatFields);
  assert(answer.choices[0].message.content.includes("Paris"));
}

async function stream() {
  const pieces = [];
  const chunks = await client().chat.completions.create({ ...chatFields, stream: true });
  for await (const chunk of chunks) {
    const text = chunk.choices[0].delta.content;
    if (text) pieces.push(text);
  }
  checkPieces(pieces);
}

async function usage() {
  const whole = (await client().chat.completions.create(chatFields)).usage;
  assert(whole.prompt_tokens > 0 && whole.completion_tokens > 0);
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = await client().chat.completions.create({ ...chatFields, ...options });
  let last;
  for await (const chunk of chunks) last = chunk;
  assert.equal(last.usage.total_tokens, whole.total_tokens);
}

async function several() {
  const answer = await client().chat.completions.create({ ...chatFields, temperature: 1, n: 2 });
  assert.equal(answer.choices.length, 2);
}

async function tools() {
  const answer = await client().chat.completions.create(toolFields);
  const message = answer.choices[0].message;
  assert.equal(message.tool_calls.length, 1);
  const call = message.tool_calls[0];
  checkCall(call.function.name, call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: '{"degrees": 21}' };
  const messages = [...toolFields.messages, message, result];
  const final = await client().chat.completions.create({ ...chatFields, messages, tools: [tool] });
  assert(final.choices[0].message.content || final.choices[0].message.tool_calls);
}

async function toolsStreamed() {
  const events = client().chat.completions.stream(toolFields);
  const pieces = [];
  events.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  const answer = await events.finalChatCompletion();
  const call = answer.choices[0].message.tool_calls[0];
  checkCall(call.function.name, call.function.arguments);
  assert.equal(pieces.join(""), call.function.arguments);
}

async function jsonSchema() {
  const format = {
    type: "json_schema",
    json_schema: { name: "city", schema: citySchema, strict: true },
  };
  const fields = { ...chatFields, response_format: format };
  const answer = await client().chat.completions.parse(fields);
  assert.equal(typeof answer.choices[0].message.parsed.city, "string");
}

async function badRequest() {
  const fields = { ...chatFields, temperature: tooHot };
  const error = await thrown(() => client().chat.completions.create(fields));
  assert(error instanceof OpenAI.BadRequestError, error);
  assert.equal(error.param, "temperature");
}

async function wrongKey() {
  const error = await thrown(() => client("wrong").chat.completions.create(chatFields));
  assert(error instanceof OpenAI.AuthenticationError, error);
}

async function rateLimit() {
  const limited = client(target.limited_key);
  await limited.chat.completions.create(chatFields);
  const error = await thrown(() => limited.chat.completions.create(chatFields));
  assert(error instanceof OpenAI.RateLimitError, error);
}

async function abort() {
  const endless = client(target.key, target.endless_url);
  const chunks = await endless.chat.completions.create(longFields);
  for await (const chunk of chunks) {
    assert(chunk);
    break;
  }
  await checkAborted();
}

async function streamError() {
  const endless = client(target.key, target.endless_url);
  const chunks = await endless.chat.completions.create(longFields);
  const error = await thrown(async () => {
    let dead = false;
    for await (const chunk of chunks) {
      assert(chunk);
      if (!dead) killEngine();
      dead = true;
    }
  });
  assert(error instanceof OpenAI.APIError, error);
  assert.equal(error.code, "engine_unavailable");
}

await run({
  chat,
  stream,
  usage,
  n: several,
  tools,
  "tools streamed": toolsStreamed,
  json_schema: jsonSchema,
  400: badRequest,
  401: wrongKey,
  429: rateLimit,
  abort,
  "error in stream": streamError,
});
