// The cells of the Vercel AI SDK with @ai-sdk/anthropic, on /v1/messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { runCells } from "./ai_sdk.mjs";

const modelOf = (apiKey, url) => createAnthropic({ baseURL: `${url}/v1`, apiKey })("demo");

// The provider lowers a temperature above 1 itself.
await runCells(modelOf, { bad: { topK: -5 }, param: "top_k" });
