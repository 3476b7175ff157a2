// What the Prompt page says about tokens and warnings, without any drawing.

import { visible } from "../text.js";

/** Why a warning matters and what to do, by its code. */
export const lintHelp = {
  two_bos: "The model has seen one beginning-of-text token in training. Leave it to the template or to the tokenizer, not to both.",
  no_bos: "Many models answer badly without it. Check the chat template.",
  trailing_space: "Remove the space at the end, or let the model write it.",
  no_system_message: "Add one if the model should follow instructions in the whole chat. Models work without it, too.",
  unread_argument: "It changes nothing. Check its spelling against the template.",
  tools_not_shown: "The model cannot call a function that it does not see.",
  reasoning_not_shown: "Templates commonly drop earlier reasoning. The prompt then differs from what the model wrote, so its cached tokens end there.",
  content_not_shown: "The template changes or drops it, so the model does not read what you wrote.",
  system_message_dropped: "The template ignores the system role. Put the instructions into the first user message.",
  tool_call_not_shown: "The model does not see that it has called this function.",
  special_token_in_content: "The model reads it as a control token, not as text. Text from users must not contain it: it can end a turn or fake one.",
  context_length_exceeded: "The server refuses this prompt. Shorten it, or drop early messages.",
};

/** Which of three states a token is in, as `{id, text}`. */
export function stateOf(answer, index) {
  const { cached_tokens: cached, block_size: size } = answer;
  if (index >= cached) return "new";
  return index < Math.floor(cached / size) * size ? "cached" : "part";
}

export const STATES = {
  cached: ["cached", "in a whole block of the prefix cache: nothing is computed for it"],
  part: ["partly in a block", "a cached block begins with it: its keys and values are copied"],
  new: ["new", "the model computes it"],
};

/** How many tokens an image has, and how it was cut: "image 1: 64 tokens, 3 × 4 tiles". */
export function imageLine(answer, place) {
  const { tokens, tiles, grid: [rows, columns] } = answer.images[place];
  const number = tokens.toLocaleString("en");
  const isGrid = rows * columns > 0;
  let cut = tiles === 1 ? "1 tile" : `${tiles} tiles`;
  if (tiles === 1 && isGrid && tokens === rows * columns) cut = `${rows} × ${columns}`;
  else if (tiles > 1 && rows * columns === tiles) cut = `${rows} × ${columns} tiles`;
  else if (tiles > 1 && rows * columns + 1 === tiles) cut = `${rows} × ${columns} tiles and an overview`;
  return `image ${place + 1}: ${number} tokens, ${cut}`;
}

/** The text of a box. */
export function boxText(answer, box) {
  return box.place === undefined ? shown(answer, box.begin) : imageLine(answer, box.place);
}

/** One line about a box, as `describe`. */
export function describeBox(answer, { begin, end, place }) {
  if (place === undefined) return describe(answer, begin);
  const { width, height, tokens } = answer.images[place];
  const number = (value) => value.toLocaleString("en");
  const cached = Math.min(Math.max(answer.cached_tokens - begin, 0), end - begin);
  const facts = [
    `tokens ${number(begin + 1)} to ${number(end)} of ${number(answer.ids.length)}`,
    `a picture of ${number(width)} × ${number(height)} pixels`,
    `blocks ${Math.floor(begin / answer.block_size)} to ${Math.floor((end - 1) / answer.block_size)}`,
    `${number(cached)} cached, ${number(end - begin - cached)} new`,
  ];
  if (tokens < end - begin) facts.push(`${number(end - begin - tokens)} of them separate its tiles`);
  return facts.join(" · ");
}

/** The state of a box: that of its last token. */
export const stateOfBox = (answer, { end }) => stateOf(answer, end - 1);

/** The text of a token as it is drawn: white space visible, and bytes where it is no character. */
export function shown(answer, index) {
  const bytes = answer.bytes[index];
  if (bytes !== null) return bytes.toUpperCase().replace(/../g, (two) => `⟨${two}⟩`);
  const piece = answer.pieces[index] || (answer.entries[index] ?? "?");
  return visible(piece);
}

/** One line about a token, for the read-out and for screen readers. */
export function describe(answer, index) {
  const [name, meaning] = STATES[stateOf(answer, index)];
  const size = answer.block_size;
  const block = Math.floor(index / size);
  const facts = [
    `token ${index + 1} of ${answer.ids.length}`,
    `id ${answer.ids[index]}`,
    `begins at character ${answer.offsets[index]}`,
    `block ${block}, place ${index % size}`,
    `${name}: ${meaning}`,
  ];
  if (answer.special[index]) facts.splice(2, 0, "special");
  const isOpen = (block + 1) * size > answer.ids.length;
  if (stateOf(answer, index) === "new" && isOpen) facts.push("its block is not full yet");
  return facts.join(" · ");
}

const HELD = {
  cache_salt: "another cache salt",
  model: "another adapter",
  system: "the system message",
  template: "text of the chat template, such as a date or an option",
  text: "other text",
  tools: "the tools",
};
const SAME = {
  evicted: "It begins in the same way, but the cache does not hold its blocks.",
  hit: "It can use every whole block of that prompt.",
  not_found: "The server does not remember this answer.",
  unavailable: "This model's cache has no prefixes to compare.",
};

/** One sentence about a comparison: the first block that differs, and what it holds. */
export function causeOf(comparison) {
  if (comparison.type !== "miss") return SAME[comparison.type];
  const { first_different_block: block, held, lost_tokens: lost } = comparison;
  const [, index] = held.split(".");
  const name = index === undefined ? HELD[held] : `message ${Number(index) + 1}`;
  const tokens = `${lost.toLocaleString("en")} token${lost === 1 ? "" : "s"} in whole blocks`;
  return `Block ${block} is the first that differs: it holds ${name}. Lost: ${tokens}.`;
}

/**
 * What this version loses against the baseline: `{tokens, ms}`, or null. `ms` is null without a
 * fit. Tokens that were deleted at the end are no loss.
 */
export function lossOf(answer, baseline) {
  if (!baseline) return null;
  const had = Math.min(baseline.cached_tokens, Math.max(answer.ids.length - 1, 0));
  const tokens = had - answer.cached_tokens;
  if (tokens <= 0) return null;
  const cost = answer.prefill;
  if (!cost) return { tokens, ms: null };
  const begin = answer.cached_tokens;
  const keys = tokens * begin + (tokens * (tokens + 1)) / 2;
  const steps = Math.ceil(tokens / answer.max_num_batched_tokens);
  const us = tokens * cost.us_per_token + (keys * cost.ns_per_key) / 1000;
  return { tokens, ms: us / 1000 + (steps - 1) * cost.base_ms };
}
