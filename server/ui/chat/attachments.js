// Text files that are sent with a message.

import { post } from "../api.js";
import { hello } from "../store.js";

const MOST_BYTES_PER_TOKEN = 16; // a larger file cannot fit, and is not sent to be counted

/**
 * Read a file as `{name, text, tokens}`. Throws an Error that says why it cannot be attached: it is
 * no text, or the context has no room for it behind `used` tokens.
 */
export async function attachment(file, used) {
  const longest = hello.value.ready.max_model_len;
  if (file.size > longest * MOST_BYTES_PER_TOKEN) throw tooLong(file.name, null, used);
  const text = textOf(file.name, await file.arrayBuffer());
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  const body = { model: hello.value.model.id, prompt: text, add_special_tokens: false };
  const { count } = await post("tokenize", body);
  if (used + count >= longest) throw tooLong(file.name, count, used);
  return { name: file.name, text, tokens: count };
}

function textOf(name, bytes) {
  const problem = new Error(`${name} is not a text file in UTF-8. Only text can be attached.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw problem;
  }
  if (text.includes("\0")) throw problem;
  return text.replaceAll("\r\n", "\n");
}

function tooLong(name, count, used) {
  const number = (value) => value.toLocaleString("en");
  const longest = hello.value.ready.max_model_len;
  const size = count === null ? `more than ${number(longest)}` : number(count);
  const others = used ? `, and ${number(used)} of them are in use` : "";
  return new Error(`${name} has ${size} tokens. This model's context has ${number(longest)}${others}. `
    + "Attach a shorter part of the file.");
}

/** The text of a message with its files: each has its name and is fenced. */
export function withFiles(text, files = []) {
  const parts = files.map((file) => {
    const ticks = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(ticks + 1);
    return `File ${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}
