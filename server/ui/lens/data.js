// What the server computes for a text: one lens for all tabs, heads and rows on demand.
import { get, post, request } from "../api.js";
import { useEffect, useState } from "../html.js";

const PATH = "/ui/api/lens";
let made = 0; // reports: equal tokens may show other images

/** Ask `load` again whenever `key` changes; return `{value, error, isLoading}`. */
export function useAnswer(key, load) {
  const [found, setFound] = useState({ key: null });
  useEffect(() => {
    if (!key) return undefined;
    const stop = new AbortController();
    const set = (answer) => stop.signal.aborted || setFound({ key, ...answer });
    load(stop.signal).then((value) => set({ value }), (error) => set({ error: error.message }));
    return () => stop.abort();
  }, [key]);
  if (!key) return { isLoading: false };
  return found.key === key ? { ...found, isLoading: false } : { isLoading: true };
}

/** The lens of a body `{text | ids, source | source_ids}`, or nothing for null. */
export function useLens(body) {
  return useAnswer(body && JSON.stringify(body), async (signal) => {
    const report = await post(PATH, body, { signal });
    made += 1;
    return { ...report, key: made };
  });
}

/** Read something of a layer; make a new capture if the last is gone or has not kept the layer. */
async function ofCapture(report, body, layer, read) {
  try {
    return await read(report.capture);
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  const isWhole = Object.values(report.attention).every(({ kept }) => kept.length > 0);
  const layers = isWhole ? {} : { layers: [layer] };
  const again = await post(PATH, { ...body, want: ["thumbs"], ...layers });
  report.capture = again.capture;
  return read(report.capture);
}

/** The shades of a head, row by row. */
export function useHead(report, body, { stack, layer, head }) {
  return useAnswer(JSON.stringify([report.key, stack, layer, head]), (signal) => {
    const path = (capture) => `${PATH}/${capture}/${layer}/${head}?stack=${stack}`;
    return ofCapture(report, body, layer, async (capture) => {
      const answer = await request(path(capture), { signal });
      return new Uint8Array(await answer.arrayBuffer());
    });
  });
}

/**
 * The exact weights of one row, and its scores before and after a softcap. `head` may be "mean", for
 * the mean of all heads, which has no scores.
 */
export function useRow(report, body, { stack, layer, head }, row) {
  const key = JSON.stringify([report.key, stack, layer, head, row]);
  return useAnswer(row === null ? null : key, async (signal) => {
    await pause(120, signal); // the cursor may only pass
    const path = (capture) => `${PATH}/${capture}/${layer}/${head}?stack=${stack}&row=${row}`;
    return ofCapture(report, body, layer, (capture) => get(path(capture), { signal }));
  });
}

/** What a recurrent layer keeps; it is computed if the report, which has many layers, lacks it. */
export function useTrace(report, body, trace) {
  const key = JSON.stringify([report.key, "states", trace.layer]);
  const again = useAnswer(trace.norms ? null : key, async (signal) => {
    const wanted = { ...body, want: ["states"], layers: [trace.layer] };
    const { states } = await post(PATH, wanted, { signal });
    return states.find(({ layer }) => layer === trace.layer);
  });
  return trace.norms ? { value: trace } : again;
}

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    reject(signal.reason);
  });
});

/** The bytes of a base64 string. */
export function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/**
 * The answer of the chat with this id: `{body, omitted, answerFrom, pictures}`. Tokens at the end that
 * the lens does not take are omitted; they change nothing before them. `answerFrom` is the answer's
 * first position, and `pictures` are the URLs of those in its prompt. Throws an Error if the answer is
 * not known, or if its prompt has pictures and does not fit.
 */
export async function bodyOfAnswer(id, facts) {
  let chat;
  try {
    chat = await import("../chat/answers.js");
  } catch {
    throw new Error("The answers of the chat could not be loaded.");
  }
  const answer = await chat.answerOf(id);
  if (!answer) throw new Error("This answer is not known in this browser.");
  const most = facts.ready.max_lens_tokens;
  if (facts.ready.kind === "encoder-decoder") {
    const ids = answer.tokens.slice(0, most - 1); // the start token takes one place
    return { body: { source_ids: answer.prompt, ids }, omitted: answer.tokens.length - ids.length, answerFrom: 1 };
  }
  const all = [...answer.prompt, ...answer.tokens];
  const answerFrom = Math.min(answer.prompt.length, most - 1);
  const { pictures } = answer;
  const body = { ids: all.slice(0, most) };
  if (pictures.length) {
    if (answer.prompt.length >= most) throw tooLong(answer.prompt.length, most);
    body.images = pictures;
  }
  return { body, omitted: Math.max(0, all.length - most), answerFrom, pictures };
}

function tooLong(count, most) {
  const number = (value) => value.toLocaleString("en");
  return new Error(`The prompt has ${number(count)} tokens with its pictures, and the lens takes `
    + `${number(most)} at most. Ask with a smaller picture, or with fewer.`);
}
