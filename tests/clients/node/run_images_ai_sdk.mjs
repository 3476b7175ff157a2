// Images of the Vercel AI SDK, with three of its providers: those of chats, Responses and Messages.
//
// The argument is the JSON of Target in ../python/image_cells.py. It prints one line of JSON per
// cell: {"client", "cell", "passed", "reason"}.

import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { thrown } from "./cells.mjs";

const target = JSON.parse(process.argv[2]);
const model = "seer";
const settings = { baseURL: `${target.url}/v1`, apiKey: "none" };
const pictures = target.pictures.map((text) => new Uint8Array(Buffer.from(text, "base64")));
const noImage = new Uint8Array(Buffer.from("%PDF-1.7 no picture"));
const mediaType = "image/png";

const clients = {
  "@ai-sdk/openai-compatible": createOpenAICompatible({
    name: "penstock",
    supportsMultiPartToolContent: true, // else images of tools are sent as text
    ...settings,
  })(model),
  "@ai-sdk/openai": createOpenAI(settings)(model),
  "@ai-sdk/anthropic": createAnthropic(settings)(model),
};

function imagePart(image) {
  return { type: "image", image, mediaType };
}

function filePart(data) {
  return { type: "file", data, mediaType };
}

function fields(client, parts) {
  const content = [{ type: "text", text: target.question }, ...parts];
  return { model: client, maxOutputTokens: 12, maxRetries: 0, messages: [{ role: "user", content }] };
}

async function textOf(client, ...parts) {
  return (await generateText(fields(client, parts))).text;
}

// Return the length of a prompt in which a tool returned an output.
async function lengthOf(client, output) {
  const call = { type: "tool-call", toolCallId: "call_1", toolName: "look", input: {} };
  const result = { type: "tool-result", toolCallId: "call_1", toolName: "look", output };
  const messages = [
    { role: "user", content: "Look!" },
    { role: "assistant", content: [call] },
    { role: "tool", content: [result] },
  ];
  return (await generateText({ ...fields(client, []), messages })).usage.inputTokens;
}

function cellsOf(client) {
  return {
    async one() {
      assert.equal(await textOf(client, imagePart(pictures[0])), target.one);
      const url = `data:image/png;base64,${target.pictures[0]}`;
      assert.equal(await textOf(client, imagePart(url)), target.one);
    },
    async "file part"() {
      assert.equal(await textOf(client, filePart(pictures[0])), target.one);
    },
    async stream() {
      const pieces = [];
      const result = streamText(fields(client, [imagePart(pictures[0])]));
      for await (const piece of result.textStream) pieces.push(piece);
      assert.equal(pieces.join(""), target.one);
    },
    async several() {
      assert.equal(await textOf(client, ...pictures.map(imagePart)), target.several);
    },
    async "tool result"() {
      const image = { type: "file", data: { type: "data", data: target.pictures[0] }, mediaType };
      const shown = await lengthOf(client, { type: "content", value: [image] });
      const due = target.tokens[1] - target.tokens[0];
      const more = shown - (await lengthOf(client, { type: "text", value: "-" }));
      assert(more > due / 2, `${more} tokens more, of an image with ${due}`);
    },
    async "no image"() {
      const error = await thrown(() => textOf(client, imagePart(noImage)));
      assert.equal(error.statusCode, 400, String(error));
      assert(error.message.includes("The image is a PDF"), error.message);
    },
  };
}

for (const [name, client] of Object.entries(clients)) {
  for (const [cell, check] of Object.entries(cellsOf(client))) {
    let reason = "";
    try {
      await check();
    } catch (error) {
      reason = String(error);
      console.error(error);
    }
    console.log(JSON.stringify({ client: name, cell, passed: !reason, reason }));
  }
}
process.exit(0);
