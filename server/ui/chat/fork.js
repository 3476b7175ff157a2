// A branch of an answer: some of its tokens are kept, one is chosen, and the model goes on.
//
// The server gets the kept tokens as a part of the prompt. Presence and frequency penalties count
// the new tokens alone, and `min_tokens` and `max_tokens` are reduced. So an answer has parts:
// `{start, params}` says that the tokens from index `start` on were drawn with `params`, and that
// all tokens before `start` were the prompt. `chosen` has the indices of the chosen tokens.

import { post } from "../api.js";

/** The parts of an answer; one that is no branch has a single part. */
export const partsOf = (node) => node.parts ?? [{ start: 0, params: node.params }];

/**
 * Prepare the branch of `node` that has the token `tokenId` at `index`. Returns what `joinFork`
 * needs, the request `body`, and the `text` of the kept tokens. `finish` is set if nothing is left
 * to write.
 */
export async function forkFrom(node, index, tokenId, facts) {
  const tokens = [...node.tokens.slice(0, index), tokenId];
  const params = paramsBehind(node, tokens.length, facts);
  const parts = partsOf(node).filter(({ start }) => start <= index);
  return {
    index, tokenId, tokens,
    prompt: node.prompt,
    body: { model: facts?.model.id, prompt: [...node.prompt, ...tokens], ...params },
    parts: [...parts, { start: tokens.length, params }],
    chosen: [...(node.chosen ?? []).filter((place) => place < index), index],
    text: await textOf(tokens, node.params),
    finish: finishOf(node, tokenId, params, facts),
  };
}

/** The parameters of what follows `count` tokens of an answer. */
function paramsBehind(node, count, facts) {
  // A grammar and the options of the chat template belong to the whole answer.
  const {
    tools: _, tool_choice: __, parallel_tool_calls: ___, response_format: ____,
    chat_template_kwargs: _____, reasoning_effort: ______, max_completion_tokens, ...params
  } = node.params;
  // The completions route has a default of few tokens; a chat's is the rest of the context.
  const room = (facts?.ready.max_model_len ?? Infinity) - node.prompt.length;
  const longest = Math.min(max_completion_tokens ?? params.max_tokens ?? Infinity, room);
  params.max_tokens = longest - count;
  if (params.min_tokens) params.min_tokens = Math.max(params.min_tokens - count, 0);
  return params;
}

function finishOf(node, tokenId, params, facts) {
  const ends = [...(params.stop_token_ids ?? [])];
  if (!params.ignore_eos) ends.push(...(facts?.end_tokens ?? []));
  if (ends.includes(tokenId)) return "stop";
  return params.max_tokens <= 0 ? "length" : null;
}

async function textOf(tokens, params) {
  const skip_special_tokens = params.skip_special_tokens ?? true;
  return (await post("detokenize", { tokens, skip_special_tokens })).prompt;
}

/** Make an answer of what was kept and what has been written behind it. */
export async function joinFork(node, { index, tokenId, tokens, prompt, parts, chosen, text }) {
  node.fork = { index, tokenId };
  node.parts = parts;
  node.chosen = chosen;
  node.tokens = [...tokens, ...node.tokens];
  node.prompt = prompt;
  if (text.endsWith("\uFFFD")) {
    // The first new tokens may complete a character.
    node.content = await textOf(node.tokens, node.params).catch(() => node.content);
  }
  const thoughts = /^\s*<think>([^]*?)<\/think>\s*([^]*)$/.exec(node.content);
  if (thoughts) [, node.reasoning, node.content] = thoughts;
}
