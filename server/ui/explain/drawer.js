// Inspector: why the tokens of an answer were drawn. A drawer next to any answer.

import { html, useEffect, useState, useStyle } from "../html.js";
import { navigate, route } from "../router.js";
import { Inspector } from "./inspector.js";

/** `params` has `answer`, the id of an answer of the chat, and `token`, an index in it. */
export default function Drawer({ params }) {
  useStyle("explain/drawer.css");
  const [found, setFound] = useState(null); // {answer, fork}
  useEffect(() => {
    let isCurrent = true;
    find(params.answer).then(
      (entry) => isCurrent && setFound(entry),
      (error) => isCurrent && setFound({ problem: error.message }),
    );
    return () => { isCurrent = false; };
  }, [params.answer]);
  const { answer, fork, problem } = found ?? {};
  const show = (token) => {
    navigate(route.value.page, { ...route.value.params, token }, { replace: true });
  };
  return html`<div class="ins">
    <h2>Why these tokens</h2>
    ${problem && html`<p role="alert">${problem}</p>`}
    ${!found && html`<p role="status" class="muted">Loading…</p>`}
    ${answer && html`<${Inspector} key=${answer.id} answer=${answer} fork=${fork}
      token=${Number(params.token) || 0} onToken=${show} />`}
  </div>`;
}

/** The answer, and the chat's function that forks it. The chat's module is loaded for them only. */
async function find(id) {
  const { answerOf, fork } = await import("../chat/answers.js");
  const answer = await answerOf(id);
  if (!answer) throw new Error("This answer is no longer in this browser.");
  // A branch continues token ids, and ids alone do not hold pictures.
  return { answer, fork: answer.pictures.length ? null : fork };
}
