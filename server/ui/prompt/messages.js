// The messages of a chat: add, remove, change the role or the content.
import { html } from "../html.js";

const ROLES = ["system", "user", "assistant"];

export function Messages({ messages, lint, change }) {
  const put = (index, part) =>
    change(messages.map((message, i) => (i === index ? { ...message, ...part } : message)));
  const add = (role) => change([...messages, { role, content: "" }]);
  const drop = (index) => change(messages.filter((_, i) => i !== index));
  const next = messages.at(-1)?.role === "user" ? "assistant" : "user";
  return html`
    <ol class="pr-messages">
      ${messages.map((message, index) => html`<li key=${index}>
        <div class="pr-message-head">
          <select aria-label=${`Role of message ${index + 1}`} value=${message.role}
            onChange=${(event) => put(index, { role: event.target.value })}>
            ${ROLES.map((role) => html`<option key=${role} value=${role}>${role}</option>`)}
          </select>
          <button class="quiet" disabled=${messages.length === 1} onClick=${() => drop(index)}
            aria-label=${`Remove message ${index + 1}`}>×</button>
        </div>
        <textarea rows=${rowsOf(message.content)} value=${message.content} spellcheck=${false}
          aria-label=${`Content of message ${index + 1}`}
          aria-invalid=${lint.some(({ param }) => param?.startsWith(`messages.${index}.`))}
          onInput=${(event) => put(index, { content: event.target.value })} />
      </li>`)}
    </ol>
    <div class="pr-actions">
      <button onClick=${() => add(next)}>Add ${next} message</button>
      ${messages[0]?.role !== "system" && html`<button
        onClick=${() => change([{ role: "system", content: "" }, ...messages])}>
        Add system message</button>`}
    </div>`;
}

function rowsOf(content) {
  return Math.min(12, Math.max(2, Math.ceil(content.length / 50), content.split("\n").length));
}
