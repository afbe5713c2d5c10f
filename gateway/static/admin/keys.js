// API keys of a customer: create, rotate, change or expire, revoke. A new secret is shown once, and leaves the page with its dialog.
"use strict";

const Keys = (() => {
  const { element } = Format;

  // The dialog that follows an action with a new key.
  function shownOnce(secret, text) {
    const field = element("input", undefined, "secret");
    const copied = element("span", "", "good");
    Object.assign(field, { value: secret, readOnly: true, id: "secret" });
    field.setAttribute("aria-label", "The new key");
    copied.setAttribute("role", "status");
    const copy = Parts.button("Copy", "copy", async () => {
      field.select();
      const written = await navigator.clipboard?.writeText(secret).then(() => true, () => false); // Without TLS there is no clipboard.
      copied.textContent = written || document.execCommand("copy") ? "Copied." : "Not copied: copy the selected text.";
    });
    const line = element("p", undefined, "actions");
    line.append(copy, copied);
    return { title: "The new key", lines: [[`${text} This is the only time that it is shown: store it now.`]], fields: [field, line] };
  }

  async function create(customer, refresh) {
    const form = await Forms.build("NewKey", { first: ["name", "expires_in"], skip: ["customer"] });
    Forms.open({
      title: `Create a key of ${customer.name}`, form, verb: "Create",
      send: async (values) => {
        const { found } = await Api.send("POST", "/keys", { name: "", ...values, customer: customer.id });
        refresh();
        return shownOnce(found.key, `Key ${found.changes.at(-1).new.id} of ${customer.name} is created.`);
      },
    });
  }

  async function rotate(key, refresh) {
    const form = await Forms.build("Rotation");
    Forms.open({
      title: `Rotate key ${key.id} (${key.name})`, form, verb: "Rotate", lines: [["A second key is created. Both work until the grace time of the old one is over."]],
      send: async (values) => {
        const { found } = await Api.send("POST", `/keys/${key.id}/rotate`, values);
        const old = found.changes.find((each) => each.new.id === key.id).new;
        refresh();
        return shownOnce(found.key, `Key ${key.id} works until ${Parts.when(old.expires_at)}.`);
      },
    });
  }

  function change(key, refresh) {
    return Forms.edit({
      title: `Change or expire key ${key.id}`, path: `/keys/${key.id}`, schema: "KeyChanges", first: ["name", "expires_at"],
      done: () => {
        refresh();
        return `Key ${key.id} is changed.`;
      },
    });
  }

  function revoke(key, refresh) {
    Dialog.open({
      title: `Revoke key ${key.id} (${key.name})?`, lines: [["Its requests are rejected within a second. This cannot be undone."]], verb: "Revoke",
      act: async () => {
        await Api.send("DELETE", `/keys/${key.id}`);
        refresh();
        return `Key ${key.id} is revoked.`;
      },
    });
  }

  const verbs = (key, refresh) => [["administer", "Rotate", () => rotate(key, refresh), key.id], ["administer", "Change or expire", () => change(key, refresh), key.id],
    ["revoke_key", "Revoke", () => revoke(key, refresh), key.id]];

  function cell(key, refresh) {
    const node = element("span", undefined, "actions");
    if (key.state !== "revoked") node.append(...Parts.buttons(verbs(key, refresh).filter(([, label]) => key.state === "live" || label !== "Rotate")));
    return node;
  }

  async function section(customer, refresh) {
    const keys = await Api.all("/keys", { customer: customer.id });
    const rows = keys.map((key) => [element("code", key.id), key.name, element("span", key.state, key.state === "live" ? "good" : "bad"), Parts.when(key.created_at),
      Parts.when(key.expires_at), Parts.when(key.last_used_at), key.models?.join(", ") ?? "all of the customer", key.quotas?.join(", ") ?? "none of its own", cell(key, refresh)]);
    const nodes = [...Parts.cards("Keys", ["Key", "Name", "State", "Created", "Expires", "Last used", "Models", "Quotas", "Actions"], rows),
      Parts.actions([["administer", "Create key", () => create(customer, refresh)]])];
    const refused = keys.length ? Parts.refused(verbs(keys[0], refresh)) : null;
    return refused ? [...nodes, refused] : nodes;
  }

  return { section };
})();
