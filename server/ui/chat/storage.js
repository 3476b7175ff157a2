// Chats are kept in this browser (IndexedDB). The server keeps nothing.

import { saveJson } from "../files.js";
import { isPicture } from "../pictures.js";

const NAME = "penstock";
const STORE = "chats";
const FORMAT = "penstock-chats";

function asPromise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function store(mode) {
  return (await open()).transaction(STORE, mode).objectStore(STORE);
}

/** All chats, the one that changed last first. */
export async function loadChats() {
  const chats = await asPromise((await store("readonly")).getAll());
  return chats.sort((a, b) => b.changed - a.changed);
}

export async function saveChat(chat) {
  await asPromise((await store("readwrite")).put(chat));
}

export async function deleteChat(id) {
  await asPromise((await store("readwrite")).delete(id));
}

/** Offer the chats as a file. */
export function exportChats(chats) {
  const text = JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);
  saveJson(text, chats.length === 1 ? "chat.json" : "chats.json");
}

/** The chats of an exported file. Throws an Error that says what is wrong with the text. */
export function importedChats(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) {
    throw new Error("The file has no chats that Penstock has exported.");
  }
  for (const chat of file.chats) check(chat);
  return file.chats;
}

function check(chat) {
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const isSound =
    isObject(chat) && typeof chat.id === "string" && typeof chat.title === "string" &&
    [chat.options, chat.nodes, chat.chosen].every(isObject);
  if (!isSound) throw new Error("A chat in the file is incomplete.");
  for (const [id, node] of Object.entries(chat.nodes)) {
    const hasTexts = isObject(node) && [node.role, node.content, node.parent].every(isText);
    const { pictures = [] } = node;
    const hasPictures = Array.isArray(pictures) && pictures.every(isPicture);
    if (!hasTexts || !hasPictures || node.id !== id || !isAbove(chat, node)) {
      throw new Error(`A message of the chat “${chat.title}” is broken.`);
    }
  }
}

const isText = (value) => typeof value === "string";

/** Whether the messages above this one lead to the start, without a circle. */
function isAbove(chat, node) {
  const seen = new Set();
  for (let at = node; at.parent !== ""; at = chat.nodes[at.parent]) {
    if (seen.has(at.id) || !Object.hasOwn(chat.nodes, at.parent)) return false;
    seen.add(at.id);
  }
  return true;
}
