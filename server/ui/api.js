// Requests to the server: JSON and server-sent events, with the key and the pages' header.
import { askForKey, key } from "./store.js";

/** The address of the server, above /ui/. Relative, so that a proxy may add a prefix. */
export const BASE = new URL("..", import.meta.url);

/** An answer outside 2xx. `message` is the server's; `status` is 0 if there was no answer. */
export class ApiError extends Error {
  constructor(status, message, body = null) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

function headersWith(extra = {}) {
  const headers = { "X-Penstock-UI": "1", ...extra };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  return headers;
}

/** Send a request and return the Response. Throws ApiError unless its status is 2xx. */
export async function request(path, { method = "GET", body, headers, signal } = {}) {
  const sentKey = key.value;
  const options = { method, headers: headersWith(headers), signal, cache: "no-store" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), BASE), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  // A late answer may belong to a key that has been replaced.
  if (response.status === 401 && sentKey === key.value) askForKey.value = true;
  throw await errorOf(response);
}

/** The error of a body that was cut off. A stop by the user stays what it is. */
function asLost(error) {
  if (error.name === "AbortError") return error;
  return new ApiError(0, "The connection to the server was lost.");
}

async function errorOf(response) {
  try {
    const answer = await response.json();
    return new ApiError(response.status, answer.error.message, answer);
  } catch {
    return new ApiError(response.status, `The server answered ${response.status}.`);
  }
}

/** Return the JSON at `path`. */
export async function get(path, options = {}) {
  return (await request(path, options)).json();
}

/** Send `body` as JSON to `path`; return the JSON of the answer. */
export async function post(path, body, options = {}) {
  return (await request(path, { ...options, method: "POST", body })).json();
}

/**
 * Read server-sent events by fetch, because EventSource cannot send a key. `onEvent` gets
 * `{event, data, id}` with `data` as text. Returns when the stream ends.
 */
export async function events(path, options, onEvent) {
  const headers = { Accept: "text/event-stream", ...options.headers };
  const response = await request(path, { ...options, headers });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => { throw asLost(error); });
    if (done) return;
    rest = (rest + value).replaceAll("\r\n", "\n");
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = parseEvent(part);
      if (event) onEvent(event);
    }
  }
}

/** Return the event of a block of lines, or null for a comment (the keep-alive). */
export function parseEvent(block) {
  const event = { event: "message", data: [], id: null };
  for (const line of block.split("\n")) {
    const match = /^(event|data|id):? ?(.*)$/.exec(line);
    if (!match) continue;
    if (match[1] === "data") event.data.push(match[2]);
    else event[match[1]] = match[2];
  }
  return event.data.length ? { ...event, data: event.data.join("\n") } : null;
}
