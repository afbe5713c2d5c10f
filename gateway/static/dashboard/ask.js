// Every action is asked for once more, with what it means, and told when it is done. A refusal stays until it was read.
"use strict";

const Ask = (() => {
  const BASE = "/internal/dashboard";
  const SHOWN_MS = 15000;
  const by = (id) => document.getElementById(id);
  const { element } = Words;
  let under = null;
  let hiding = null;

  // One request of an action. Throws an error whose text is the gateway's own sentence.
  async function post(path, body) {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(BASE + path, { method: "POST", headers, body: JSON.stringify(body) });
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.error.message);
    return said;
  }

  function told(text, className) {
    by("done").textContent = text;
    by("done").className = className;
    by("done").hidden = false;
    clearTimeout(hiding);
    hiding = setTimeout(() => (by("done").hidden = true), SHOWN_MS);
  }

  // `lines` are [text, class]; `act` is given the reason and a function that shows progress, and gives what to tell.
  function open({ title, lines, verb, reason, act }) {
    if (by("ask").open) return;
    under = { act, running: false };
    by("ask-title").textContent = title;
    by("ask-lines").replaceChildren(...lines.map(([text, className]) => element("p", text, className)));
    by("ask-why").hidden = !reason;
    by("ask-reason").value = "";
    by("ask-progress").textContent = "";
    by("ask-fault").textContent = "";
    by("ask-do").textContent = verb;
    by("ask-do").hidden = false;
    by("ask-do").disabled = false;
    by("ask-cancel").textContent = "Cancel";
    by("ask").showModal();
  }

  async function carryOut() {
    const asked = under;
    if (!asked || asked.running) return;
    asked.running = true;
    by("ask-do").disabled = true;
    by("ask-progress").textContent = "Under way …";
    const progress = (text) => under === asked && (by("ask-progress").textContent = text);
    try {
      const text = await asked.act(by("ask-reason").value.trim(), progress);
      if (under === asked) by("ask").close();
      told(text, "good");
    } catch (error) {
      if (under !== asked) return told(error.message, "bad");
      by("ask-progress").textContent = "";
      by("ask-fault").textContent = error.message;
      by("ask-do").hidden = true;
      by("ask-cancel").textContent = "Close";
      by("ask-cancel").focus();
    }
  }

  by("ask-do").addEventListener("click", carryOut);
  by("ask-reason").addEventListener("keydown", (event) => event.key === "Enter" && carryOut());
  by("ask-cancel").addEventListener("click", () => by("ask").close());
  // The browser tells of a close later: by then the next question may stand there.
  by("ask").addEventListener("close", () => {
    if (!by("ask").open) under = null;
  });

  return { BASE, open, post };
})();
