// The cells of the Vercel AI SDK with @ai-sdk/openai-compatible, on /v1/chat/completions.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { runCells } from "./ai_sdk.mjs";

await runCells((apiKey, url) => {
  const settings = { includeUsage: true, supportsStructuredOutputs: true };
  const provider = createOpenAICompatible({
    name: "penstock",
    baseURL: `${url}/v1`,
    apiKey,
    ...settings,
  });
  return provider("demo");
});
