// The cells of the Vercel AI SDK, which are the same for all of its providers.

import assert from "node:assert";
import { Output, generateText, jsonSchema as schemaOf, streamText, tool } from "ai";
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

const tools = {
  get_weather: tool({ description: "The weather.", inputSchema: schemaOf(citySchema) }),
};

function checkStatus(error, status) {
  assert.equal(error.statusCode, status, String(error));
}

// `modelOf(key, url)` returns a model of the provider under test. `bad` is a setting that the server
// refuses, naming `param`. `namedEnd` is the reason for which the call of a named tool ends.
export async function runCells(modelOf, options = {}) {
  const { bad = { temperature: tooHot }, param = "temperature", namedEnd = "tool-calls" } = options;
  const own = { temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

  function fields(more = {}) {
    return { model: modelOf(target.key, target.url), ...own, prompt: question, ...more };
  }

  function endless() {
    const model = modelOf(target.key, target.endless_url);
    return fields({ model, maxOutputTokens: 1000, onError: () => {} });
  }

  async function chat() {
    const answer = await generateText(fields());
    assert(answer.text.includes("Paris"), answer.text);
    assert.equal(answer.finishReason, "stop");
  }

  async function stream() {
    const pieces = [];
    for await (const piece of streamText(fields()).textStream) pieces.push(piece);
    checkPieces(pieces);
  }

  async function usage() {
    const whole = (await generateText(fields())).usage;
    assert(whole.inputTokens > 0 && whole.outputTokens > 0, JSON.stringify(whole));
    const result = streamText(fields());
    await result.consumeStream();
    assert.equal((await result.usage).totalTokens, whole.totalTokens);
  }

  async function toolsWhole() {
    const answer = await generateText(fields({ prompt: weather, tools, toolChoice: "required" }));
    assert.equal(answer.toolCalls.length, 1);
    const call = answer.toolCalls[0];
    checkCall(call.toolName, call.input);
    assert.equal(answer.finishReason, "tool-calls");
    const output = { type: "json", value: { degrees: 21 } };
    const result = { type: "tool-result", toolCallId: call.toolCallId, toolName: "get_weather", output };
    const messages = [
      { role: "user", content: weather },
      ...answer.response.messages,
      { role: "tool", content: [result] },
    ];
    const final = await generateText(fields({ prompt: undefined, messages, tools }));
    assert(final.text || final.toolCalls.length);
  }

  async function toolsStreamed() {
    const result = streamText(fields({ prompt: weather, tools, toolChoice: "required" }));
    const pieces = [];
    for await (const part of result.fullStream)
      if (part.type === "tool-input-delta") pieces.push(part.delta);
    const [call] = await result.toolCalls;
    checkCall(call.toolName, call.input);
    assert.deepEqual(JSON.parse(pieces.join("")), call.input);
    assert.equal(await result.finishReason, "tool-calls");
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const named = streamText(fields({ prompt: weather, tools, toolChoice }));
    assert.equal((await named.toolCalls).length, 1);
    assert.equal(await named.finishReason, namedEnd);
  }

  async function jsonSchema() {
    const output = Output.object({ schema: schemaOf(citySchema) });
    const answer = await generateText(fields({ output }));
    assert.equal(typeof answer.output.city, "string");
  }

  async function badRequest() {
    const error = await thrown(() => generateText(fields(bad)));
    checkStatus(error, 400);
    assert(error.message.includes(param), error.message);
  }

  async function wrongKey() {
    const model = modelOf("wrong", target.url);
    checkStatus(await thrown(() => generateText(fields({ model }))), 401);
  }

  async function rateLimit() {
    const model = modelOf(target.limited_key, target.url);
    await generateText(fields({ model }));
    checkStatus(await thrown(() => generateText(fields({ model }))), 429);
  }

  async function abort() {
    const controller = new AbortController();
    const result = streamText({ ...endless(), abortSignal: controller.signal });
    let seen = 0;
    for await (const piece of result.textStream) {
      assert(typeof piece === "string");
      seen += 1;
      if (seen === 2) controller.abort();
    }
    await checkAborted();
  }

  async function streamError() {
    const errors = [];
    let dead = false;
    for await (const part of streamText(endless()).fullStream) {
      if (part.type === "text-delta" && !dead) {
        killEngine();
        dead = true;
      }
      if (part.type === "error") errors.push(part.error);
    }
    assert.equal(errors.length, 1);
    const [error] = errors;
    const text = error instanceof Error ? error.message : JSON.stringify(error);
    assert(text.includes("engine"), text);
  }

  await run({
    chat,
    stream,
    usage,
    n: "the client has no n",
    tools: toolsWhole,
    "tools streamed": toolsStreamed,
    json_schema: jsonSchema,
    400: badRequest,
    401: wrongKey,
    429: rateLimit,
    abort,
    "error in stream": streamError,
  });
}
