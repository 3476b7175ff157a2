// The cells of the Vercel AI SDK with @ai-sdk/openai-compatible, on /v1/chat/completions.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { runCells } from "./ai_sdk.mjs";

function modelOf(apiKey, url) {
  const settings = { includeUsage: true, supportsStructuredOutputs: true };
  const provider = createOpenAICompatible({
    name: "penstock",
    baseURL: `${url}/v1`,
    apiKey,
    ...settings,
  });
  return provider("demo");
}

// Only chats end the call of a named tool with "stop", as OpenAI's own do.
await runCells(modelOf, { namedEnd: "stop" });
