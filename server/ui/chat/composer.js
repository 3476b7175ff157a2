// The box to write in.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../html.js";
import { route } from "../router.js";
import { current, live, say } from "./state.js";
import { shown } from "./tree.js";

const MOST_HEIGHT = 240;

/** The entry of `live` of the message that is being written in the current chat, or undefined. */
export function writing() {
  return shown(current.value).map((node) => live.value[node.id]).find(Boolean);
}

/** Whether a drawer or a dialog is open, which Escape closes. */
function isCovered() {
  return Boolean(route.value.params.drawer || document.querySelector("dialog[open]"));
}

export function Composer() {
  const [text, setText] = useState("");
  const field = useRef(null);
  const active = writing();
  useEffect(() => {
    // A drawer that was opened by its address has the focus already.
    if (document.activeElement === document.body) field.current.focus({ preventScroll: true });
  }, []);
  useLayoutEffect(() => {
    const { style } = field.current;
    style.height = "";
    if (text) style.height = `${Math.min(field.current.scrollHeight + 2, MOST_HEIGHT)}px`;
  }, [text]);
  useEffect(() => {
    if (!active) return undefined;
    const onKey = (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !isCovered()) active.stop();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [active]);
  const send = (event) => {
    event.preventDefault();
    if (!text.trim() || active) return;
    setText("");
    say(text.trim());
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send}>
    <textarea rows="1" ref=${field} value=${text} aria-label="Message"
      placeholder="Ask something. Enter sends, Shift+Enter starts a line."
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey} />
    ${active
      ? html`<button type="button" onClick=${active.stop} title="Stop (Esc)">Stop</button>`
      : html`<button class="primary" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}
