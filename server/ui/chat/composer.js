// The box to write in.

import { html, useEffect, useLayoutEffect, useNarrow, useRef, useState } from "../html.js";
import {
  Attached, FileButton, PictureButton, pastedFiles, pictureOf, pictureType, reducedLine, roomBehind,
  takesImages, withPictures,
} from "../pictures.js";
import { isCovered } from "../sheet.js";
import { attachment } from "./attachments.js";
import { canAsk, current, live, messagesOf, notice, say } from "./state.js";
import { shown } from "./tree.js";

const MOST_HEIGHT = 240;

/** The entry of `live` of the message that is being written in the current chat, or undefined. */
export function writing() {
  return shown(current.value).map((node) => live.value[node.id]).find(Boolean);
}

/** The tokens of the chat so far, those of its last request and answer, and of attached files. */
function usedTokens({ files }) {
  const answers = shown(current.value).filter(({ usage }) => usage);
  const usage = answers.at(-1)?.usage;
  const ofChat = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  return files.reduce((total, { tokens }) => total + tokens, ofChat);
}

const NOTHING = { files: [], pictures: [] };

/**
 * Text files and pictures to send, and a function that adds some, one after the other. One that
 * cannot be sent gives a notice, and so does a picture that was reduced.
 */
function useAttached() {
  const [attached, setAttached] = useState(NOTHING);
  const [isReading, setReading] = useState(false);
  const now = useRef(attached); // also before the next rendering
  const turn = useRef(Promise.resolve());
  const put = (next) => {
    now.current = next;
    setAttached(next);
  };
  const add = async (given) => {
    notice.value = "";
    const added = [];
    const problems = [];
    for (const file of given) {
      try {
        const type = await pictureType(file);
        const room = roomBeside(now.current.files, now.current.pictures);
        const read = type
          ? await pictureOf(file, type, room)
          : await attachment(file, usedTokens(now.current));
        const kind = type ? "pictures" : "files";
        if (type) added.push(read);
        put({ ...now.current, [kind]: [...now.current[kind], read] });
      } catch (error) {
        problems.push(error.message);
      }
    }
    notice.value = [...problems, reducedLine(added)].filter(Boolean).join(" ");
  };
  const attach = (given) => {
    setReading(true);
    const mine = turn.current.then(() => add(given)).then(() => {
      if (turn.current === mine) setReading(false);
    });
    turn.current = mine;
    return mine;
  };
  return { attached, isReading, put, attach };
}

/** The bytes that a body has left for a picture beside these attachments. */
function roomBeside(files, pictures) {
  const chat = current.value;
  const last = shown(chat).at(-1)?.id;
  return roomBehind([...messagesOf(chat, last), files, withPictures("", pictures)]);
}

export function Composer() {
  const [text, setText] = useState("");
  const { attached, isReading, put, attach } = useAttached();
  const { files, pictures } = attached;
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
  const canSend = !isReading && (text.trim() || files.length > 0 || pictures.length > 0);
  const send = (event) => {
    event.preventDefault();
    if (!canSend || active || !canAsk()) return;
    setText("");
    put(NOTHING);
    say(text.trim(), attached);
  };
  const paste = (event) => {
    const pasted = pastedFiles(event);
    if (!pasted.length) return;
    event.preventDefault();
    attach(pasted);
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
          onClick=${() => put({ pictures, files: files.filter((one) => one !== file) })}>×</button></li>`)}
    </ul>`}
    <${Attached} pictures=${pictures} change=${(left) => put({ files, pictures: left })} />
    <${Picker} attach=${attach} />
    <textarea rows="1" ref=${field} value=${text} aria-label="Message"
      placeholder=${isNarrow ? "Ask something" : "Ask something. Shift+Enter starts a line."}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey} onPaste=${paste} />
    ${active
      ? html`<button type="button" onClick=${active.stop} title="Stop (Esc)">Stop</button>`
      : html`<button class="primary" disabled=${!canSend}>Send</button>`}
  </form>`;
}

/** Buttons that pick text files, and pictures if the model takes some. */
function Picker({ attach }) {
  return html`
    <${FileButton} attach=${attach} name="Files" title="Attach text files" label="Attach files">+</${FileButton}>
    ${takesImages() && html`<${PictureButton} attach=${attach} />`}`;
}
