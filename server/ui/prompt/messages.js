// The messages of a chat: add, remove, change the role or the content.
import { html, useState } from "../html.js";
import {
  Attached, PictureButton, otherForm, pastedFiles, pictureOf, pictureType, reducedLine, roomBehind,
  takesImages,
} from "../pictures.js";

const ROLES = ["system", "user", "assistant"];

/** `change` gets a function from the messages, as they are by then, to the next ones. */
export function Messages({ messages, lint, change }) {
  const put = (index, part) => change((now) =>
    now.map((message, i) => (i === index ? { ...message, ...part(message) } : message)));
  const add = (role) => change((now) => [...now, { role, content: "" }]);
  const drop = (index) => change((now) => now.filter((_, i) => i !== index));
  const [notice, setNotice] = useState("");
  const attach = async (files, index) => {
    const { added, said } = await picturesFrom(files, messages);
    setNotice(said);
    if (added.length) put(index, ({ pictures = [] }) => ({ pictures: [...pictures, ...added] }));
  };
  const paste = (event, index) => {
    const pasted = takesImages() ? pastedFiles(event) : [];
    if (!pasted.length) return;
    event.preventDefault();
    attach(pasted, index);
  };
  const next = messages.at(-1)?.role === "user" ? "assistant" : "user";
  return html`
    <ol class="pr-messages">
      ${messages.map((message, index) => html`<li key=${index}>
        <div class="pr-message-head">
          <select aria-label=${`Role of message ${index + 1}`} value=${message.role}
            onChange=${({ target }) => put(index, () => ({ role: target.value }))}>
            ${ROLES.map((role) => html`<option key=${role} value=${role}>${role}</option>`)}
          </select>
          <button class="quiet" disabled=${messages.length === 1} onClick=${() => drop(index)}
            aria-label=${`Remove message ${index + 1}`}>×</button>
        </div>
        <textarea rows=${rowsOf(message.content)} value=${message.content} spellcheck=${false}
          aria-label=${`Content of message ${index + 1}`}
          aria-invalid=${lint.some(({ param }) => param?.startsWith(`messages.${index}.`))}
          onInput=${({ target }) => put(index, () => ({ content: target.value }))}
          onPaste=${(event) => paste(event, index)} />
        <${Attached} pictures=${message.pictures ?? []} change=${(pictures) => put(index, () => ({ pictures }))} />
        ${takesImages() && message.role === "user" && html`<${PictureButton}
          attach=${(files) => attach(files, index)} />`}
      </li>`)}
    </ol>
    ${notice && html`<p class="warn" role="alert">${notice}</p>`}
    <div class="pr-actions">
      <button onClick=${() => add(next)}>Add ${next} message</button>
      ${messages[0]?.role !== "system" && html`<button
        onClick=${() => change((now) => [{ role: "system", content: "" }, ...now])}>
        Add system message</button>`}
    </div>`;
}

function rowsOf(content) {
  return Math.min(12, Math.max(2, Math.ceil(content.length / 50), content.split("\n").length));
}

/** The pictures of files beside these messages, and what to say of them. */
async function picturesFrom(files, messages) {
  const added = [];
  const problems = [];
  for (const file of files) {
    try {
      const type = await pictureType(file);
      if (!type) throw otherForm(file);
      // An edit sends the version before it, too.
      added.push(await pictureOf(file, type, roomBehind([messages, added]) / 2));
    } catch (error) {
      problems.push(error.message);
    }
  }
  return { added, said: [...problems, reducedLine(added)].filter(Boolean).join(" ") };
}
