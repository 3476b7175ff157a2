// A chat is a tree of messages. An edit or another answer is a sibling, and one path is shown.

import { withPictures } from "../pictures.js";
import { withFiles } from "./attachments.js";

/** The parent of the first messages. */
export const ROOT = "";

export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}

/** A chat without messages. `options` is what its requests have beside the messages. */
export function newChat(options = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, options, nodes: {}, chosen: {} };
}

/** Add a message behind `parent` and show it. `fields` has at least `role` and `content`. */
export function add(chat, parent, fields) {
  const node = { id: newId(), parent, order: Object.keys(chat.nodes).length, ...fields };
  chat.nodes[node.id] = node;
  chat.chosen[parent] = node.id;
  chat.changed = Date.now();
  if (!chat.title && node.role === "user") {
    const attached = [...(node.files ?? []), ...(node.pictures ?? [])];
    chat.title = titleOf(node.content || attached.map(({ name }) => name).join(", "));
  }
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The messages behind `parent`, the oldest first. */
export function children(chat, parent) {
  const found = Object.values(chat.nodes).filter((node) => node.parent === parent);
  return found.sort((a, b) => a.order - b.order);
}

/** The messages that are shown, the first one first. */
export function shown(chat) {
  const found = [];
  for (let id = chat.chosen[ROOT]; id && chat.nodes[id]; id = chat.chosen[id]) {
    found.push(chat.nodes[id]);
  }
  return found;
}

/** The messages from the first to the one with this id. */
export function pathTo(chat, id) {
  const found = [];
  for (let node = chat.nodes[id]; node; node = chat.nodes[node.parent]) found.unshift(node);
  return found;
}

/** The pictures of the messages from the first to the one with this id, in order. */
export function picturesTo(chat, id) {
  return pathTo(chat, id).flatMap(({ pictures = [] }) => pictures);
}

/** Show the sibling that is `by` places behind this message. */
export function choose(chat, node, by) {
  const all = children(chat, node.parent);
  const next = all[all.indexOf(node) + by];
  if (next) chat.chosen[node.parent] = next.id;
}

/** Delete a message and all behind it. */
export function remove(chat, node) {
  for (const child of children(chat, node.id)) remove(chat, child);
  delete chat.nodes[node.id];
  delete chat.chosen[node.id];
  const rest = children(chat, node.parent);
  if (rest.length) chat.chosen[node.parent] = rest.at(-1).id;
  else delete chat.chosen[node.parent];
  chat.changed = Date.now();
}

/** The `messages` of a request that continues behind these messages. */
export function asMessages(nodes, system) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    const text = withFiles(node.content, node.files);
    const message = { role: node.role, content: withPictures(text, node.pictures) };
    if (node.toolCalls?.length) {
      message.tool_calls = node.toolCalls.map(({ id, name, args }) => {
        return { id, type: "function", function: { name, arguments: args } };
      });
      message.content ||= null;
    }
    if (node.role === "tool") message.tool_call_id = node.toolCallId;
    found.push(message);
  }
  return found;
}

/** Whether a chat contains the words, in any case. */
export function matches(chat, words) {
  const text = [chat.title, ...Object.values(chat.nodes).map((node) => node.content ?? "")];
  const all = text.join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}
