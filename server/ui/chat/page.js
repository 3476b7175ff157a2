// Chat: the list of chats, the messages of one, the box to write in, and the parameters.

import { html, useEffect, useNarrow, useState, useStyle } from "../html.js";
import { NotLoaded, useModule } from "../modules.js";
import { navigate } from "../router.js";
import { hello } from "../store.js";
import { Composer } from "./composer.js";
import { colouring } from "./hover.js";
import { ChatList } from "./list.js";
import { Settings } from "./settings.js";
import { current, load, notice, open, restoreOptions } from "./state.js";
import { Thread } from "./thread.js";

export default function Chat({ params }) {
  useStyle("chat/chat.css");
  const colour = useNarrow() ? "Colour: " : ""; // the label before the menu has no room
  const [side, setSide] = useState(""); // on narrow windows: "list", "settings" or ""
  useEffect(() => {
    load().then(() => {
      if (params.chat && !open(params.chat)) notice.value = "This browser has no such chat.";
    });
  }, [params.chat]);
  useEffect(() => {
    const { id, nodes } = current.value;
    const chat = Object.keys(nodes).length ? id : "";
    if ((params.chat ?? "") !== chat) navigate("chat", { ...params, chat }, { replace: true });
  }, [current.value.id, Object.keys(current.value.nodes).length > 0]);

  const facts = hello.value;
  useEffect(() => { if (facts) restoreOptions(); }, [facts?.model.id]);
  if (!facts) return html`<p class="empty muted">Asking the server…</p>`;
  if (facts.ready.kind !== "decoder") return html`<${Other} kind=${facts.ready.kind} />`;
  const hasMessages = Object.keys(current.value.nodes).length > 0; // else the heading is the welcome
  const toggle = (name) => setSide(side === name ? "" : name);
  return html`<div class="chat">
    <${ChatList} isOpen=${side === "list"} close=${() => setSide("")} />
    <section class="chat-main" aria-label="Chat">
      <div class="chat-bar">
        <button class="chat-side" type="button" aria-expanded=${side === "list"}
          onClick=${() => toggle("list")}>Chats</button>
        <${hasMessages ? "h1" : "span"} class="chat-name">${current.value.title || "New chat"}</>
        <label><span>Colour tokens by</span>
          <select aria-label="Colour tokens by" value=${colouring.value}
            onChange=${(event) => { colouring.value = event.target.value; }}>
            <option value="none">${colour}nothing</option>
            <option value="bits">${colour}surprise</option>
          </select></label>
        <button class="chat-side" type="button" aria-expanded=${side === "settings"}
          onClick=${() => toggle("settings")}>Settings</button>
      </div>
      <${Thread} />
      <${Notice} />
      <${Composer} />
    </section>
    <${Settings} isOpen=${side === "settings"} close=${() => setSide("")} />
  </div>`;
}

function Notice() {
  if (!notice.value) return null;
  return html`<p class="chat-notice warn" role="alert">${notice.value}
    <button class="quiet" type="button" onClick=${() => { notice.value = ""; }}>Dismiss</button>
  </p>`;
}

/** Models without chats: translation, or the similarity of texts. */
function Other({ kind }) {
  const name = kind === "encoder" ? "pairs" : "translate";
  const { component, error } = useModule(name, () => import(`./${name}.js`));
  if (error) return html`<${NotLoaded} what="This page" error=${error} atReturn />`;
  return component && html`<${component} />`;
}
