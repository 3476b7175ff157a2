// What the drawers ask of the chat: an answer by its id, and another branch of it.

import { partsOf } from "./fork.js";
import { chats, current, forkOf, load } from "./state.js";
import { picturesTo } from "./tree.js";

const chatOf = (id) => [current.value, ...chats.value].find((chat) => chat.nodes[id]);
const nodeOf = (id) => chatOf(id)?.nodes[id] ?? null;

/**
 * The answer with this id: its request's id and sampling parameters, the token ids of its prompt
 * and of itself, the URLs of the `pictures` in its prompt, and of a branch its `parts` and `chosen`
 * tokens (see fork.js). Null if this browser
 * has no such answer.
 */
export async function answerOf(id) {
  await load();
  const node = nodeOf(id);
  if (node?.role !== "assistant" || !node.tokens?.length) return null;
  const { requestId, prompt, tokens, content, params } = node;
  const { chosen = [] } = node;
  const pictures = picturesTo(chatOf(id), id).map(({ url }) => url);
  return {
    id, requestId, prompt, tokens, text: content, params, parts: partsOf(node), chosen, pictures,
  };
}

/** Keep the answer's tokens before `index`, go on with `tokenId`, and show that branch. */
export async function fork(id, index, tokenId) {
  await forkOf(nodeOf(id), index, tokenId);
}
