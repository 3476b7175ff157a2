// The cells of the Vercel AI SDK with @ai-sdk/openai, on /v1/responses.

import { createOpenAI } from "@ai-sdk/openai";
import { runCells } from "./ai_sdk.mjs";

await runCells((apiKey, url) => createOpenAI({ baseURL: `${url}/v1`, apiKey })("demo"));
