// One answer of the server: the request, and what its stream says, as it comes.

import { events, get } from "../api.js";

/** What an answer has from the first moment on; `stream` fills it. */
export function emptyAnswer(requestId, params) {
  return {
    requestId, params, content: "", reasoning: "", toolCalls: [], prompt: [], tokens: [],
    finish: null, usage: null, rate: null, firstTokenMs: null, queueMs: null, error: "",
    isLost: false, // the server did not answer, or no longer
  };
}

/**
 * Send `body` to a chat or completions route and add what comes to `answer`. Calls `changed` after
 * each event. An answer that `signal` stops has `finish` "stopped".
 */
export async function stream(path, body, answer, signal, changed) {
  const options = {
    method: "POST", signal, headers: { "x-request-id": answer.requestId },
    body: {
      ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true,
      timings_per_token: true,
    },
  };
  try {
    await events(path, options, ({ data }) => {
      if (data === "[DONE]") return;
      read(JSON.parse(data), answer);
      changed();
    });
    if (!answer.finish && !answer.error) {
      answer.error = "The stream ended before the answer did.";
      answer.isLost = true;
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else Object.assign(answer, { error: error.message, isLost: error.status === 0 });
  }
  changed();
}

function read(event, answer) {
  if (event.error) {
    answer.error = event.error.message;
    return;
  }
  if (event.usage) answer.usage = event.usage;
  if (event.timings) readTimings(event.timings, answer);
  if (event.prompt_token_ids) answer.prompt = event.prompt_token_ids; // of a chat
  for (const choice of event.choices) {
    if (choice.prompt_token_ids) answer.prompt = choice.prompt_token_ids; // of a completion
    if (choice.token_ids) answer.tokens.push(...choice.token_ids);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    if (choice.text) answer.content += choice.text;
    if (choice.delta) readDelta(choice.delta, answer);
  }
}

function readTimings(timings, answer) {
  if (timings.predicted_per_second) answer.rate = timings.predicted_per_second;
  answer.firstTokenMs = timings.prompt_ms;
}

function readDelta(delta, answer) {
  if (delta.content) answer.content += delta.content;
  if (delta.reasoning_content) answer.reasoning += delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    answer.toolCalls[part.index] ??= { id: "", name: "", args: "" };
    const call = answer.toolCalls[part.index];
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name += part.function.name;
    if (part.function?.arguments) call.args += part.function.arguments;
  }
}

/** Replace what the stream said of times by the engine's own stamps. Returns whether there are any. */
export async function addStamps(answer) {
  try {
    const report = await get(`ui/api/requests/${encodeURIComponent(answer.requestId)}`);
    const { submitted, admitted, first_token: first } = report.stamps;
    if (admitted !== null) answer.queueMs = admitted - submitted;
    if (first !== null) answer.firstTokenMs = first;
    return true;
  } catch {
    return false; // the record may be gone; the stream's own figures stay
  }
}
