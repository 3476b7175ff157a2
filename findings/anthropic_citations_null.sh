#!/usr/bin/env bash
# What surprises: Anthropic's published OpenAPI document requires the member `citations` in each text
# block of an answer, and allows null. @ai-sdk/anthropic refuses a whole answer with
# `citations: null`, though it takes the same null in a stream. Anthropic's own API leaves the member
# out, which the document forbids and the client takes.
# Versions: llm-comply 0.5.0 (PyPI; it has a copy of the document), ai 6.0.326 and
# @ai-sdk/anthropic 3.0.140 (npm).
# Why it matters: a server that follows the document breaks every answer of this client that is not
# streamed. A server of this API must leave `citations` out.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check llm-comply==0.5.0
echo '{"private": true}' > package.json
npm install --no-audit --no-fund --loglevel error ai@6.0.326 @ai-sdk/anthropic@3.0.140

cat > document.py <<'PYTHON'
import json
from pathlib import Path

import llm_comply

path = Path(llm_comply.__file__).parent / "specs" / "anthropic.json"
block = json.loads(path.read_text())["components"]["schemas"]["ResponseTextBlock"]
kinds = [kind.get("type") for kind in block["properties"]["citations"]["anyOf"]]
print("document: required", "citations" in block["required"], "allowed", kinds)
PYTHON

cat > client.mjs <<'JAVASCRIPT'
import { createServer } from "node:http";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, streamText } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const usage = { input_tokens: 1, output_tokens: 1 };
const message = { id: "m", type: "message", role: "assistant", model: "m", content: [], usage };
const forms = { null: { citations: null }, empty: { citations: [] }, absent: {} };

function events(block) {
  return [
    { type: "message_start", message: { ...message, stop_reason: null, stop_sequence: null } },
    { type: "content_block_start", index: 0, content_block: { ...block, text: "" } },
    { type: "content_block_delta", index: 0, delta: { type: "text_delta", text: "Hi" } },
    { type: "content_block_stop", index: 0 },
    { type: "message_delta", delta: { stop_reason: "end_turn", stop_sequence: null }, usage },
    { type: "message_stop" },
  ];
}

const server = createServer(async (request, response) => {
  let text = "";
  for await (const piece of request) text += piece;
  const block = { type: "text", text: "Hi", ...forms[JSON.parse(text).model] };
  if (JSON.parse(text).stream) {
    response.writeHead(200, { "content-type": "text/event-stream" });
    const lines = events(block).map((e) => `event: ${e.type}\ndata: ${JSON.stringify(e)}\n\n`);
    response.end(lines.join(""));
  } else {
    response.writeHead(200, { "content-type": "application/json" });
    const end = { stop_reason: "end_turn", stop_sequence: null };
    response.end(JSON.stringify({ ...message, ...end, content: [block] }));
  }
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const provider = createAnthropic({ baseURL, apiKey: "none" });

for (const form of Object.keys(forms)) {
  const fields = { model: provider(form), prompt: "Hi", maxRetries: 0 };
  let whole;
  try {
    whole = (await generateText(fields)).text;
  } catch (error) {
    whole = error.message;
  }
  const streamed = await streamText({ ...fields, onError: () => {} }).text;
  console.log(`citations ${form}: whole "${whole}", streamed "${streamed}"`);
}
process.exit(0);
JAVASCRIPT

{ venv/bin/python document.py; node client.mjs; } | tee seen.txt

# Seen on 2026-11-28:
diff seen.txt - <<'SEEN'
document: required True allowed ['array', 'null']
citations null: whole "Invalid JSON response", streamed "Hi"
citations empty: whole "Hi", streamed "Hi"
citations absent: whole "Hi", streamed "Hi"
SEEN
