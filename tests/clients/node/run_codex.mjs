// The cells of the codex CLI, which only calls /v1/responses, and always streams.
//
// Its instructions and tools are about 12,000 tokens, so that the servers need a long context.

import assert from "node:assert";
import { spawn } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { checkAborted, citySchema, killEngine, question, run, target } from "./cells.mjs";

const codex = join(import.meta.dirname, "node_modules", ".bin", "codex");
const folder = mkdtempSync(join(tmpdir(), "codex-"));
const startMs = 60_000;
// The smallest PNG: one transparent pixel.
const pixel =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";

// Start `codex exec`. `events` has what it has printed; `ended` waits for its end.
function start(url, key, more = []) {
  const provider = {
    name: "penstock",
    base_url: `${url}/v1`,
    wire_api: "responses",
    env_key: "PENSTOCK_API_KEY",
    request_max_retries: 0,
    stream_max_retries: 0,
  };
  const settings = Object.entries(provider).flatMap(([name, value]) => [
    "-c",
    `model_providers.penstock.${name}=${JSON.stringify(value)}`,
  ]);
  const fixed = ["exec", "--json", "--skip-git-repo-check", "-s", "read-only"];
  const model = ["-m", "demo", "-c", 'model_provider="penstock"'];
  const child = spawn(codex, [...fixed, ...model, ...settings, ...more, "--", question], {
    cwd: folder,
    env: { ...process.env, CODEX_HOME: folder, PENSTOCK_API_KEY: key },
    stdio: ["ignore", "pipe", "inherit"],
  });
  let text = "";
  child.stdout.on("data", (data) => (text += data));
  const ended = new Promise((resolve) => child.on("close", resolve)).then(() =>
    text
      .split("\n")
      .filter((line) => line.startsWith("{"))
      .map((line) => JSON.parse(line)),
  );
  return { child, ended };
}

function messageOf(events) {
  const items = events.filter((event) => event.type === "item.completed").map((e) => e.item);
  return items.filter((item) => item.type === "agent_message").map((item) => item.text);
}

function failureOf(events) {
  const failure = events.find((event) => event.type === "turn.failed");
  assert(failure, JSON.stringify(events));
  return failure.error.message;
}

// Pass the requests on, each body after `change(body, index)`, which sets what codex cannot set.
async function changing(change) {
  const bodies = [];
  const server = createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    const fields = {
      method: request.method,
      headers: { "content-type": "application/json", authorization: request.headers.authorization },
    };
    if (request.method === "POST") {
      const body = JSON.parse(Buffer.concat(parts).toString());
      change(body, bodies.length);
      bodies.push(body);
      fields.body = JSON.stringify(body);
    }
    const answer = await fetch(`${target.url}${request.url}`, fields);
    response.writeHead(answer.status, { "content-type": answer.headers.get("content-type") });
    response.end(await answer.text());
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { server, bodies, url: `http://127.0.0.1:${server.address().port}` };
}

// Run codex without calls: the demo model may otherwise call tools until the context is full.
async function withoutCalls(key = target.key, more = []) {
  const proxy = await changing((body) => (body.tool_choice = "none"));
  const events = await start(proxy.url, key, more).ended;
  proxy.server.close();
  return events;
}

async function chat() {
  const events = await withoutCalls();
  assert(messageOf(events).join(""), JSON.stringify(events));
}

async function usage() {
  const events = await withoutCalls();
  const last = events.find((event) => event.type === "turn.completed");
  assert(last, JSON.stringify(events));
  assert(last.usage.input_tokens > 0 && last.usage.output_tokens > 0, JSON.stringify(last));
}

async function jsonSchema() {
  const file = join(folder, "city.json");
  writeFileSync(file, JSON.stringify(citySchema));
  const [text] = messageOf(await withoutCalls(target.key, ["--output-schema", file]));
  assert.deepEqual(Object.keys(JSON.parse(text)), ["city"]);
}

async function toolsStreamed() {
  const proxy = await changing((body, index) => {
    body.tool_choice = index ? "none" : { type: "function", name: "get_goal" };
    body.parallel_tool_calls = false;
  });
  const events = await start(proxy.url, target.key).ended;
  proxy.server.close();
  const isComplete = events.some((event) => event.type === "turn.completed");
  assert(isComplete, JSON.stringify(events));
  assert.equal(proxy.bodies.length, 2);
  const items = proxy.bodies[1].input;
  const call = items.find((item) => item.type === "function_call");
  const output = items.find((item) => item.type === "function_call_output");
  assert.equal(call.name, "get_goal");
  assert.deepEqual(JSON.parse(call.arguments), {});
  assert.equal(output.call_id, call.call_id);
}

async function badRequest() {
  const file = join(folder, "pixel.png");
  writeFileSync(file, Buffer.from(pixel, "base64"));
  const failure = failureOf(await start(target.url, target.key, ["-i", file]).ended);
  assert(failure.includes("only text parts are supported"), failure);
}

async function wrongKey() {
  const failure = failureOf(await start(target.url, "wrong").ended);
  assert(failure.includes("401"), failure);
}

async function rateLimit() {
  await withoutCalls(target.limited_key);
  const failure = failureOf(await withoutCalls(target.limited_key));
  assert(failure.includes("429") || failure.includes("limit"), failure);
}

async function metric(name) {
  const text = await (await fetch(`${target.endless_url}/metrics`)).text();
  const found = new RegExp(`^penstock:${name}\\{.*\\} (\\S+)$`, "m").exec(text);
  return found ? Number(found[1]) : 0;
}

// Start a turn, and wait until its answer has begun.
async function begun() {
  const earlier = await metric("time_to_first_token_seconds_count");
  const started = start(target.endless_url, target.key);
  const deadline = Date.now() + startMs;
  while (Date.now() < deadline) {
    if ((await metric("time_to_first_token_seconds_count")) > earlier) return started;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  return assert.fail("the answer did not begin");
}

async function abort() {
  const { child, ended } = await begun();
  child.kill("SIGINT");
  await ended;
  await checkAborted();
}

async function streamError() {
  const { ended } = await begun();
  killEngine();
  const failure = failureOf(await ended);
  assert(failure.includes("engine"), failure);
}

await run({
  chat,
  stream: "each request is streamed: see chat",
  usage,
  n: "the API has no n",
  tools: "each request is streamed: see tools streamed",
  "tools streamed": toolsStreamed,
  json_schema: jsonSchema,
  400: badRequest,
  401: wrongKey,
  429: rateLimit,
  abort,
  "error in stream": streamError,
});
