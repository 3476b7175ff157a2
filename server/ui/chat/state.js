// The chats, the one that is shown, and the answers that are being written.

import { get, post } from "../api.js";
import { batch, signal } from "../html.js";
import { withSampling } from "../sampling.js";
import { hello } from "../store.js";
import { forkFrom, joinFork } from "./fork.js";
import { keptOptions, keepOptions } from "./options.js";
import { deleteChat, importedChats, loadChats, saveChat } from "./storage.js";
import { addStamps, emptyAnswer, stream } from "./stream.js";
import { ROOT, add, asMessages, choose, newChat, newId, pathTo, remove, shown } from "./tree.js";

export const chats = signal([]); // those that are stored, the one that changed last first
export const current = signal(newChat()); // a new object after each change
export const live = signal({}); // by message id: {answer, stop} while it is being written
export const tick = signal(0); // grows with each frame in which an answer grew
export const notice = signal(""); // a problem to show
export const refused = signal({}); // by parameter: {text, problem} of a value that was not taken

const MOST_SEED = 2 ** 31;

let isLoaded = false;

/** Read the stored chats, once. */
export async function load() {
  if (isLoaded) return;
  isLoaded = true;
  try {
    chats.value = await loadChats();
  } catch (error) {
    notice.value = `Chats cannot be kept in this browser: ${error.message}`;
  }
}

/** Show changes of the current chat, and store it unless it is still empty. */
async function changed(chat) {
  batch(() => {
    if (chat.id === current.value.id) current.value = { ...chat };
    if (Object.keys(chat.nodes).length) {
      chats.value = [chat, ...chats.value.filter((other) => other.id !== chat.id)];
    }
  });
  if (!Object.keys(chat.nodes).length) return;
  try {
    await saveChat(chat);
  } catch (error) {
    notice.value = `This chat cannot be kept: ${error.message}`;
  }
}

export function open(id) {
  const found = chats.value.find((chat) => chat.id === id);
  if (found && id !== current.value.id) {
    refused.value = {};
    current.value = { ...found };
  }
  return Boolean(found);
}

/** Begin a chat with the options of the last one. */
export function begin() {
  refused.value = {};
  current.value = newChat(lasting(current.value));
}

export async function forget(id) {
  for (const [node, { stop }] of Object.entries(live.value)) {
    if (chats.value.find((chat) => chat.id === id)?.nodes[node]) stop();
  }
  chats.value = chats.value.filter((chat) => chat.id !== id);
  if (current.value.id === id) begin();
  await deleteChat(id);
}

export async function importText(text) {
  try {
    for (const chat of importedChats(text)) await changed(chat);
    notice.value = "";
  } catch (error) {
    notice.value = error.message;
  }
}

export function setOptions(options) {
  const chat = current.value;
  chat.options = { ...chat.options, ...options };
  keepOptions(lasting(chat));
  changed(chat);
}

/** Give this chat the tools of a first prompt, unless it has some. Other chats do not get them. */
export function lendTools(tools) {
  const chat = current.value;
  if (chat.options.tools?.trim()) return;
  chat.lentTools = tools;
  chat.options = { ...chat.options, tools };
  changed(chat);
}

/** The options of a chat that the next chat begins with. */
function lasting({ options, lentTools }) {
  const { tools, ...rest } = options;
  return tools === undefined || tools === lentTools ? rest : { ...rest, tools };
}

/** Forget all options: of this chat, and those that are kept for this model. */
export function resetOptions() {
  const chat = current.value;
  refused.value = {};
  chat.options = {};
  keepOptions({});
  changed(chat);
}

/** Give a chat that is still empty the options that were last used with this model. */
export function restoreOptions() {
  const chat = current.value;
  if (Object.keys(chat.nodes).length || Object.keys(chat.options).length) return;
  chat.options = keptOptions();
  changed(chat);
}

/** Whether a request can be made of the settings; a notice says why not. */
export function canAsk() {
  try {
    requestOf(current.value);
    return true;
  } catch (error) {
    notice.value = error.message;
    return false;
  }
}

/** Say something behind the messages that are shown, and have it answered. */
export function say(text, { files = [], pictures = [] } = {}) {
  if (!canAsk()) return undefined;
  const chat = current.value;
  const parent = shown(chat).at(-1)?.id ?? ROOT;
  const attached = { ...(files.length && { files }), ...(pictures.length && { pictures }) };
  const node = add(chat, parent, { role: "user", content: text, ...attached });
  return answerBehind(chat, node.id);
}

/** Replace a message by another version of it. An answer to a new question is made at once. */
export function edit(node, text) {
  const chat = current.value;
  const { role, toolCallId, files, pictures } = node;
  const version = add(chat, node.parent, { role, content: text, toolCallId, files, pictures });
  return role === "assistant" ? changed(chat) : answerBehind(chat, version.id);
}

/** Answer a tool call by hand. The model goes on when every call has its answer. */
export function answerTool(node, call, text) {
  const chat = current.value;
  const parent = shown(chat).at(-1).id;
  const result = add(chat, parent, { role: "tool", content: text, toolCallId: call.id });
  const given = new Set(shown(chat).filter(({ role }) => role === "tool").map((one) => one.toolCallId));
  const isComplete = node.toolCalls.every(({ id }) => given.has(id));
  return isComplete ? answerBehind(chat, result.id) : changed(chat);
}

export function regenerate(node) {
  if (!canAsk()) return undefined;
  return answerBehind(current.value, node.parent);
}

/** Ask again for an answer that failed. One without text is replaced. */
export function retry(node) {
  if (!canAsk()) return undefined; // the failed answer stays
  const chat = current.value;
  if (!node.content && !node.reasoning && !node.toolCalls?.length) remove(chat, node);
  return answerBehind(chat, node.parent);
}

export function show(node, by) {
  const chat = current.value;
  choose(chat, node, by);
  changed(chat);
}

export function drop(node) {
  const chat = current.value;
  remove(chat, node);
  changed(chat);
}

/** What the requests of a chat have beside the messages. Throws an Error that names a bad field. */
export function requestOf(chat) {
  for (const [name, { problem }] of Object.entries(refused.value)) {
    throw new Error(`${name} is not valid: ${problem}`);
  }
  const { params = {}, tools = "", schema = "", templateOptions = "" } = chat.options;
  const body = { model: hello.value?.model.id, ...withSampling(params) };
  body.seed ??= Math.floor(Math.random() * MOST_SEED); // known, so that the answer can be explained
  if (tools.trim()) body.tools = parsed(tools, "Tools");
  if (templateOptions.trim()) body.chat_template_kwargs = parsed(templateOptions, "Template options");
  if (schema.trim()) {
    const json_schema = { name: "answer", schema: parsed(schema, "The JSON schema") };
    body.response_format = { type: "json_schema", json_schema };
  }
  return body;
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} must be JSON: ${error.message}`);
  }
}

/** The messages of a request that continues behind the one with this id. */
export function messagesOf(chat, id) {
  return asMessages(pathTo(chat, id), chat.options.system ?? "");
}

async function answerBehind(chat, parent) {
  let request;
  try {
    request = requestOf(chat);
  } catch (error) {
    notice.value = error.message;
    return changed(chat);
  }
  const messages = messagesOf(chat, parent);
  const { model, ...params } = request;
  return write(chat, parent, "v1/chat/completions", { model, messages, ...params }, params);
}

/** Continue the answer `node` with another token at `index`: a branch beside it. */
export async function forkOf(node, index, tokenId) {
  const chat = chatWith(node.id);
  const fork = await forkFrom(node, index, tokenId, hello.value);
  return write(chat, node.parent, "v1/completions", fork.body, node.params, fork);
}

function chatWith(nodeId) {
  if (current.value.nodes[nodeId]) return current.value;
  return chats.value.find((chat) => chat.nodes[nodeId]);
}

/** Write an answer behind `parent`, and store it when it is complete. */
async function write(chat, parent, path, body, params, fork = null) {
  const answer = emptyAnswer(`ui-${newId()}`, params);
  const node = add(chat, parent, { role: "assistant", ...answer });
  if (fork) node.content = fork.text;
  if (fork?.finish) return finishAtOnce(chat, node, fork);
  const controller = new AbortController();
  live.value = { ...live.value, [node.id]: { answer: node, stop: () => controller.abort() } };
  notice.value = "";
  changed(chat);
  await stream(path, body, node, controller.signal, nextFrame);
  if (fork) await joinFork(node, fork);
  const { [node.id]: ended, ...others } = live.value;
  live.value = others;
  chat.nodes[node.id] = { ...node };
  await changed(chat);
  if (!node.tokens.length || !(await addStamps(node))) return;
  chat.nodes[node.id] = { ...node };
  await changed(chat);
}

/** Store a branch that ends with the chosen token. No request belongs to it. */
async function finishAtOnce(chat, node, fork) {
  Object.assign(node, { requestId: "", finish: fork.finish });
  await joinFork(node, fork);
  return changed(chat);
}

let frame = 0;

/** Draw the growing answers once per frame, however many events came. */
function nextFrame() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    tick.value += 1;
  });
}

/** The text of each token of an answer; their join is the text of all. */
export async function piecesOf(node) {
  node.pieces ??= (await post("detokenize", { tokens: node.tokens, return_texts: true })).texts;
  return node.pieces;
}

/** The parameters that the chat route takes, as /capabilities describes them. */
export async function chatParameters() {
  const { routes } = await get("capabilities?path=%2Fv1%2Fchat%2Fcompletions");
  return routes[0]?.parameters ?? {};
}
