// Each action is confirmed with its effect, and its result is shown. An error stays until the dialog is closed.
"use strict";

const Dialog = (() => {
  const BASE = "/internal/dashboard";
  const SHOWN_MS = 15000;
  const by = (id) => document.getElementById(id);
  const { element, coded } = Format;
  let action = null;
  let hiding = null;

  // One request of an action. Throws an error whose text is the gateway's own sentence.
  async function post(path, body) {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(BASE + path, { method: "POST", headers, body: JSON.stringify(body) });
    const result = await answer.json();
    if (!answer.ok) throw new Error(result.error.message);
    return result;
  }

  function notify(text, className) {
    by("done").replaceChildren(...coded(text));
    by("done").className = className;
    by("done").hidden = false;
    clearTimeout(hiding);
    hiding = setTimeout(() => (by("done").hidden = true), SHOWN_MS);
  }

  // `lines` are [text, class]; `act` gets the reason and a function that shows progress, and returns the notice.
  function open({ title, lines, verb, reason, act }) {
    if (by("dialog").open) return;
    action = { act, running: false };
    by("dialog-title").textContent = title;
    by("dialog-lines").replaceChildren(...lines.map(([text, className]) => element("p", text, className)));
    by("dialog-reason-line").hidden = !reason;
    by("dialog-reason").value = "";
    by("dialog-progress").textContent = "";
    by("dialog-error").textContent = "";
    by("dialog-do").textContent = verb;
    by("dialog-do").hidden = false;
    by("dialog-do").disabled = false;
    by("dialog-cancel").textContent = "Cancel";
    by("dialog").showModal();
  }

  async function carryOut() {
    const current = action;
    if (!current || current.running) return;
    current.running = true;
    by("dialog-do").disabled = true;
    by("dialog-progress").textContent = "In progress …";
    const progress = (text) => action === current && (by("dialog-progress").textContent = text);
    try {
      const text = await current.act(by("dialog-reason").value.trim(), progress);
      if (action === current) by("dialog").close();
      notify(text, "good");
    } catch (error) {
      if (action !== current) return notify(error.message, "bad");
      by("dialog-progress").textContent = "";
      by("dialog-error").replaceChildren(...coded(error.message));
      by("dialog-do").hidden = true;
      by("dialog-cancel").textContent = "Close";
      by("dialog-cancel").focus();
    }
  }

  by("dialog-do").addEventListener("click", carryOut);
  by("dialog-reason").addEventListener("keydown", (event) => event.key === "Enter" && carryOut());
  by("dialog-cancel").addEventListener("click", () => by("dialog").close());
  // The close event comes later: by then the dialog may be open for the next action.
  by("dialog").addEventListener("close", () => {
    if (!by("dialog").open) action = null;
  });

  return { BASE, open, post };
})();
