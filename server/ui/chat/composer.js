// The box to write in.

import { html, useEffect, useLayoutEffect, useNarrow, useRef, useState } from "../html.js";
import { isCovered } from "../sheet.js";
import { attachment } from "./attachments.js";
import { canAsk, current, live, notice, say } from "./state.js";
import { shown } from "./tree.js";

const MOST_HEIGHT = 240;

/** The entry of `live` of the message that is being written in the current chat, or undefined. */
export function writing() {
  return shown(current.value).map((node) => live.value[node.id]).find(Boolean);
}

/** The tokens of the chat so far: those of its last request and answer. */
function usedTokens() {
  const answers = shown(current.value).filter(({ usage }) => usage);
  const usage = answers.at(-1)?.usage;
  return usage ? usage.prompt_tokens + usage.completion_tokens : 0;
}

/** Files to send, and a function that adds some. A file that cannot be sent gives a notice. */
function useFiles() {
  const [files, setFiles] = useState([]);
  const attach = async (given) => {
    notice.value = "";
    const added = [...files];
    for (const file of given) {
      const used = added.reduce((sum, one) => sum + one.tokens, usedTokens());
      try {
        added.push(await attachment(file, used));
      } catch (error) {
        notice.value = error.message;
      }
    }
    setFiles(added);
  };
  return { files, setFiles, attach };
}

export function Composer() {
  const [text, setText] = useState("");
  const { files, setFiles, attach } = useFiles();
  const [isOver, setOver] = useState(false); // files are dragged over the box
  const field = useRef(null);
  const active = writing();
  const isNarrow = useNarrow();
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
  const canSend = text.trim() || files.length > 0;
  const send = (event) => {
    event.preventDefault();
    if (!canSend || active || !canAsk()) return;
    setText("");
    setFiles([]);
    say(text.trim(), files);
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer.files.length) attach(event.dataTransfer.files);
  };
  const drag = (event) => {
    event.preventDefault();
    setOver(event.type === "dragover");
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send} onDrop=${drop} onDragOver=${drag}
    onDragLeave=${drag} data-over=${isOver ? "true" : undefined}>
    ${files.length > 0 && html`<ul class="chips" aria-label="Attached files">
      ${files.map((file) => html`<li class="chip">${file.name}
        <small class="muted">${file.tokens.toLocaleString("en")} tok</small>
        <button class="quiet" type="button" aria-label=${`Remove ${file.name}`}
          onClick=${() => setFiles(files.filter((one) => one !== file))}>×</button></li>`)}
    </ul>`}
    <${Picker} attach=${attach} />
    <textarea rows="1" ref=${field} value=${text} aria-label="Message"
      placeholder=${isNarrow ? "Ask something" : "Ask something. Enter sends, Shift+Enter starts a line."}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey} />
    ${active
      ? html`<button type="button" onClick=${active.stop} title="Stop (Esc)">Stop</button>`
      : html`<button class="primary" disabled=${!canSend}>Send</button>`}
  </form>`;
}

/** A button that picks text files. */
function Picker({ attach }) {
  const field = useRef(null);
  const take = async () => {
    await attach([...field.current.files]);
    field.current.value = ""; // so that the same file can be picked again
  };
  return html`
    <button type="button" title="Attach text files" aria-label="Attach files"
      onClick=${() => field.current.click()}>+</button>
    <input type="file" multiple hidden ref=${field} aria-label="Files" onChange=${take} />`;
}
