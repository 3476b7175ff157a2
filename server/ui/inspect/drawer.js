// Inspector: why the tokens of an answer were drawn. A drawer next to any answer.

import { html, useEffect, useState, useStyle } from "../html.js";
import { navigate, route } from "../router.js";
import { Inspector } from "./inspector.js";

/** `params` has `answer`, the id of an answer of the chat, and `token`, an index in it. */
export default function Drawer({ params }) {
  useStyle("inspect/drawer.css");
  const [chat, setChat] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    import("../chat/answers.js").then(setChat, () => setProblem("The chat could not be loaded."));
  }, []);
  const answer = chat?.answerOf(params.answer) ?? null;
  const missing = chat && !answer;
  const note = problem || (missing && "This answer is no longer in this browser.");
  const show = (token) => {
    navigate(route.value.page, { ...route.value.params, token }, { replace: true });
  };
  return html`<div class="ins">
    <h2>Why these tokens</h2>
    ${note && html`<p role="alert">${note}</p>`}
    ${!note && !answer && html`<p role="status" class="muted">Loading…</p>`}
    ${answer && html`<${Inspector} key=${answer.id} answer=${answer} fork=${chat.fork}
      token=${Number(params.token) || 0} onToken=${show} />`}
  </div>`;
}
