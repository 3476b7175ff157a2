// Something to look at: a few small requests from this browser.
import { signal } from "../html.js";
import { post, request } from "../api.js";
import { withSampling } from "../sampling.js";
import { hello } from "../store.js";

/** Chats that "make traffic" sends. A browser has six connections to a server, so two share one. */
export const CHATS = 8;
const CHOICES = 2;
const MOST = 4; // requests of this page at a time
/** Requests of this page that are not answered yet, and what went wrong. */
export const sending = signal(0);
export const failure = signal("");

const QUESTIONS = [
  "Tell me a story about a lake.", "Why is the sky blue?", "How does a mill work?",
  "Who lives in a forest?",
];
const TOKENS = 160; // of each answer
const SHARED_TOKENS = 500; // of the answers to one prompt: long enough to be looked at
const PARAGRAPH = "The river comes down from the hills, and the mill by the bridge turns all day. ";

/** Send requests at once, each `[path, body]`. */
async function sendAll(requests) {
  if (!hasRoom(requests.length)) return;
  failure.value = "";
  sending.value += requests.length;
  await Promise.all(requests.map(async ([path, body]) => {
    try {
      // The answers do not matter; reading them lets the server send at its own pace.
      await (await request(path, { method: "POST", body })).text();
    } catch (error) {
      failure.value = error.message;
    } finally {
      sending.value -= 1;
    }
  }));
}

function small(text, number) {
  const model = hello.value.model.id;
  const { task } = hello.value.model;
  if (task === "embed") return ["v1/embeddings", { model, input: text }];
  if (task === "score") return ["v1/rerank", { model, query: text, documents: QUESTIONS }];
  if (task === "classify") return ["v1/classify", { model, input: text }];
  const length = { max_tokens: TOKENS, min_tokens: TOKENS };
  const common = { model, ...length, ...withSampling({}), stream: true, seed: number, n: CHOICES };
  if (!hello.value.has_template) return ["v1/completions", { ...common, prompt: text }];
  const messages = [{ role: "user", content: text }];
  return ["v1/chat/completions", { ...common, messages }];
}

/** Send small chats, as many as this page may still send. */
export function makeTraffic() {
  return sendAll(QUESTIONS.slice(0, MOST - sending.value).map(small));
}

/** Whether this page may send `count` more requests. */
export const hasRoom = (count) => sending.value + count <= MOST;

/** Send the same long prompt twice: the second request uses the blocks of the first. */
export async function sendTwice() {
  const { block_size: size, max_model_len: longest, kind } = hello.value.ready;
  const model = hello.value.model.id;
  if (kind !== "decoder") return sendAll([small(PARAGRAPH, 1), small(PARAGRAPH, 1)]);
  const wanted = Math.max(1, Math.min(3 * size + 8, longest >> 1));
  const tokens = Math.max(1, Math.min(SHARED_TOKENS, longest - wanted - 1));
  let ids;
  try {
    ({ tokens: ids } = await post("tokenize", { model, prompt: PARAGRAPH }));
  } catch (error) {
    failure.value = error.message;
    return undefined;
  }
  const prompt = Array.from({ length: wanted }, (_, place) => ids[place % ids.length]);
  const length = { max_tokens: tokens, min_tokens: tokens };
  const body = { model, prompt, ...length, ...withSampling({}), stream: true };
  return sendAll([1, 2].map((seed) => ["v1/completions", { ...body, seed }]));
}
