// The list of chats: search, export, import.

import { html, useMemo, useRef, useState } from "../html.js";
import { navigate } from "../router.js";
import { Sheet } from "../sheet.js";
import { begin, chats, current, forget, importText, open } from "./state.js";
import { exportChats } from "./storage.js";
import { matches } from "./tree.js";

export function ChatList({ isOpen, close }) {
  const [words, setWords] = useState("");
  const found = useMemo(
    () => (words.trim() ? chats.value.filter((chat) => matches(chat, words.trim())) : chats.value),
    [words, chats.value],
  );
  const isCurrentStored = chats.value.some((chat) => chat.id === current.value.id);
  const start = () => {
    begin();
    navigate("chat");
    close();
    document.querySelector(".composer textarea")?.focus();
  };
  return html`<${Sheet} as="aside" class="chat-list" aria-label="Chats" isOpen=${isOpen} close=${close}>
    <button class="primary" type="button" onClick=${start}>New chat</button>
    <input type="search" placeholder="Search chats" aria-label="Search chats"
      value=${words} onInput=${(event) => setWords(event.target.value)} />
    <ul>
      ${found.map((chat) => html`<${Entry} key=${chat.id} chat=${chat} close=${close} />`)}
    </ul>
    ${!found.length && html`<p class="muted chat-hint">
      ${words.trim() ? "No chat has these words." : "Chats are kept in this browser only."}</p>`}
    <div class="chat-files">
      <button class="quiet" type="button" disabled=${!isCurrentStored}
        onClick=${() => exportChats([current.value])}>Export this</button>
      <button class="quiet" type="button" disabled=${!chats.value.length}
        onClick=${() => exportChats(chats.value)}>Export all</button>
      <${Import} />
    </div>
  </${Sheet}>`;
}

function Entry({ chat, close }) {
  const isOpen = chat.id === current.value.id;
  const show = () => {
    open(chat.id);
    close();
  };
  const ask = () => {
    if (confirm(`Delete the chat “${chat.title}”?`)) forget(chat.id);
  };
  return html`<li>
    <button class="quiet chat-entry" type="button" aria-current=${isOpen ? "true" : undefined}
      onClick=${show}>${chat.title || "Untitled"}</button>
    <button class="quiet" type="button" onClick=${ask} aria-label=${`Delete ${chat.title}`}>×</button>
  </li>`;
}

function Import() {
  const field = useRef(null);
  const read = async (event) => {
    const [file] = event.target.files;
    if (file) await importText(await file.text());
    field.current.value = "";
  };
  return html`
    <button class="quiet" type="button" onClick=${() => field.current.click()}>Import</button>
    <input type="file" accept=".json,application/json" hidden ref=${field} onChange=${read}
      aria-label="File of chats" />`;
}
