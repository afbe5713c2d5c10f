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

  // `lines` are [text, class]. `fields`: elements below them, with which an error or no notice leaves the dialog open for
  // another try. `act` gets the reason and a function that shows progress, and returns the notice or the next dialog.
  // Without a verb there is no action.
  function open({ title, lines = [], fields, verb, reason, act }) {
    if (by("dialog").open) return;
    action = { act, running: false, fields };
    by("dialog-title").textContent = title;
    by("dialog-lines").replaceChildren(...lines.map(([text, className]) => element("p", text, className)), ...(fields ?? []));
    by("dialog-reason-line").hidden = !reason;
    by("dialog-reason").value = "";
    by("dialog-progress").textContent = "";
    by("dialog-error").textContent = "";
    by("dialog-do").textContent = verb ?? "";
    by("dialog-do").hidden = !verb;
    by("dialog-do").disabled = false;
    by("dialog-cancel").textContent = verb ? "Cancel" : "Close";
    by("dialog").showModal();
  }

  // The text of the button that carries the action out.
  function setVerb(text) {
    by("dialog-do").textContent = text;
  }

  function retry(current) {
    current.running = false;
    by("dialog-do").disabled = false;
    by("dialog-progress").textContent = "";
  }

  async function carryOut() {
    const current = action;
    if (!current || current.running) return;
    current.running = true;
    by("dialog-do").disabled = true;
    by("dialog-error").textContent = "";
    by("dialog-progress").textContent = "In progress …";
    const progress = (text) => action === current && (by("dialog-progress").textContent = text);
    try {
      const result = await current.act(by("dialog-reason").value.trim(), progress);
      if (result === undefined) return retry(current);
      if (action === current) by("dialog").close();
      if (typeof result === "string") notify(result, "good");
      else open(result);
    } catch (error) {
      if (action !== current) return notify(error.message, "bad");
      by("dialog-error").replaceChildren(...coded(error.message));
      if (current.fields) return retry(current);
      by("dialog-progress").textContent = "";
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
    if (by("dialog").open) return;
    action = null;
    by("dialog-lines").replaceChildren(); // It may have contained a secret.
  });

  return { BASE, open, post, notify, setVerb, carryOut };
})();
