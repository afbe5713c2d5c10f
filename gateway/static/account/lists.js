// The API keys and the asynchronous jobs of the customer. A new key is shown once, and is gone when it is closed.
"use strict";

const Lists = (() => {
  const by = (id) => document.getElementById(id);
  const { element, table, coded, codeLink } = Format;
  const when = (seconds) => seconds && element("time", new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }));

  function button(text, act, label) {
    const made = Object.assign(element("button", text), { type: "button" });
    made.addEventListener("click", act);
    if (label) made.setAttribute("aria-label", label);
    return made;
  }

  // A list whose next pages are loaded on request. `draw` gets the items of all pages.
  function paged(path, place, draw) {
    let items = [];
    async function load(after = "") {
      const page = await Session.read(path + (after && `?after=${after}`));
      items = after ? [...items, ...page.data] : page.data;
      place.replaceChildren(...draw(items));
      if (page.has_more) place.append(button("More", () => load(page.last_id).catch(failed(place))));
    }
    return () => load().catch(failed(place));
  }

  const failed = (place) => (error) => Session.isOpen() && place.replaceChildren(Format.sentence("p", error.message, error.status === 403 ? "soft" : "bad"));

  const jobs = paged("/v1/jobs", by("jobs"), (items) => table("Kept jobs", ["Id", "Status", "Model", "Submitted", "Ended", "Error"],
    items.map((each) => [each.id, each.status, each.model, when(each.created_at), when(each.completed_at), each.error_code && codeLink(each.error_code)])));

  const listed = paged("/v1/keys", by("keys"), (items) => table("Keys of this account", ["Id", "Name", "State", "Requests per second", "Quotas", "Created", "Last used", "Expires", "Action"],
    items.map((each) => [each.id, each.name, each.state, each.requests_per_second, each.quotas?.join(", "), when(each.created_at), when(each.last_used_at), when(each.expires_at),
      each.state === "live" ? button("Revoke", () => revoke(each), `Revoke ${each.name} (${each.id})`) : ""])));

  // Without the right to manage keys the list says so, and there is no form.
  async function keys() {
    by("keys-fault").textContent = "";
    await listed();
    by("new-key").hidden = !by("keys").querySelector("table");
  }

  function revoke(key) {
    const own = key.id === Account.keyId();
    Dialog.open({
      title: `Revoke ${key.name}?`,
      lines: [[`Requests with the key ${key.id} get 401 within a second. This cannot be undone.`],
        ...(own ? [["This is the key with which you are signed in.", "bad"]] : [])],
      verb: "Revoke",
      act: async () => {
        await Session.read(`/v1/keys/${encodeURIComponent(key.id)}`, { method: "DELETE" });
        await keys();
        return `${key.name} is revoked.`;
      },
    });
  }

  function hideKey() {
    by("key-shown").replaceChildren();
  }

  async function create(event) {
    event.preventDefault();
    by("keys-fault").textContent = "";
    try {
      const quotas = by("key-quotas").value.split(",").map((each) => each.trim()).filter(Boolean);
      const body = { name: by("key-name").value.trim(), requests_per_second: by("key-rate").valueAsNumber || null, quotas: quotas.length ? quotas : null };
      const made = await Session.read("/v1/keys", { method: "POST", body });
      const [box, line] = [element("div", undefined, "secret"), element("p", undefined, "actions")];
      const secret = element("code", made.key);
      line.append(button("Copy", () => copy(made.key)), button("Close", () => (hideKey(), by("key-name").focus())));
      box.append(element("p", `The key ${made.name}, shown only once:`), secret, line);
      by("key-shown").replaceChildren(box);
      by("new-key").reset();
      await keys();
    } catch (error) {
      by("keys-fault").replaceChildren(...coded(error.message));
    }
  }

  // A page without TLS has no clipboard: the text is selected instead.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const place = [...document.querySelectorAll("code, pre")].find((each) => each.textContent === text);
    getSelection().selectAllChildren(place);
  }

  function clear() {
    hideKey();
    for (const id of ["keys", "jobs", "keys-fault"]) by(id).replaceChildren();
  }

  by("new-key").addEventListener("submit", create);

  return { keys, jobs, clear, copy };
})();
