// The cells of ollama's client for JavaScript.
//
// The argument is the JSON of Target in ../python/ollama_cells.py. It prints one line of JSON per
// cell: {"client", "cell", "passed", "reason"}.

import assert from "node:assert";
import { Ollama } from "ollama";
import { checkCall, checkPieces, citySchema, question, thrown, weather } from "./cells.mjs";

const target = JSON.parse(process.argv[2]);
const client = new Ollama({ host: target.url });
const model = "demo";
const options = { temperature: 0, num_predict: 100 };
const messages = [{ role: "user", content: question }];
const tools = [
  {
    type: "function",
    function: { name: "get_weather", description: "Return the weather.", parameters: citySchema },
  },
];

async function pieces(stream, text) {
  const found = [];
  for await (const part of stream) found.push(part);
  assert(found.at(-1).done);
  return found.map(text);
}

const cells = {
  async models() {
    assert.equal((await client.list()).models[0].model, model);
    assert.equal((await client.ps()).models[0].context_length, 16384);
    const shown = await client.show({ model });
    assert(shown.capabilities.includes("tools"));
    assert.equal(shown.model_info["llama.context_length"], 16384);
    assert((await client.version()).version);
  },
  async chat() {
    const answer = await client.chat({ model, messages, options });
    assert(answer.message.content.includes("Paris"));
    assert(answer.prompt_eval_count > 0 && answer.eval_count > 0);
    assert((await client.generate({ model, prompt: question, options })).response.includes("Paris"));
  },
  async stream() {
    const chat = await client.chat({ model, messages, options, stream: true });
    checkPieces(await pieces(chat, (part) => part.message.content));
    const prompt = { model, prompt: question, options, stream: true };
    checkPieces(await pieces(await client.generate(prompt), (part) => part.response));
  },
  async tools() {
    const asked = [{ role: "user", content: weather }];
    const { message } = await client.chat({ model, messages: asked, tools, options });
    checkCall(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments);
    const result = { role: "tool", tool_name: "get_weather", content: "21 degrees" };
    const next = { model, messages: [...asked, message, result], tools, options };
    assert((await client.chat(next)).message.content.includes("21"));
  },
  async format() {
    const answer = await client.chat({ model, messages, options, format: citySchema });
    assert.deepEqual(Object.keys(JSON.parse(answer.message.content)), ["city"]);
  },
  async image() {
    const seer = new Ollama({ host: target.seeing_url });
    const message = { role: "user", content: target.question, images: [target.picture] };
    const limit = { temperature: 0, num_predict: target.seen_tokens };
    const answer = await seer.chat({ model: "seer", messages: [message], options: limit });
    assert.equal(answer.message.content, target.seen);
  },
  async embed() {
    const encoder = new Ollama({ host: target.encoder_url });
    const answer = await encoder.embed({ model: "minilm", input: target.text });
    answer.embeddings[0].forEach((number, place) =>
      assert(Math.abs(number - target.vector[place]) < 1e-6),
    );
  },
  async refused() {
    const hot = { model, messages, options: { temperature: 3 }, stream: true };
    const error = await thrown(() => client.chat(hot));
    assert.equal(error.status_code, 400);
    assert(error.message.includes("options.temperature"), error.message);
  },
};

for (const [cell, call] of Object.entries(cells)) {
  let reason = "";
  try {
    await call();
  } catch (error) {
    reason = String(error);
    console.error(error);
  }
  console.log(JSON.stringify({ client: "ollama (npm)", cell, passed: !reason, reason }));
}
