// The page of a customer: signs in with an API key, and shows the parts of the account.
"use strict";

const Account = (() => {
  const REFRESH_MS = 10000;
  const by = (id) => document.getElementById(id);
  const { coded } = Format;
  let me = null;

  async function load() {
    me = await Session.read("/v1/me");
    by("who").textContent = `${me.customer} · ${me.tier} · key ${me.key_id}`;
    Limits.show(me);
  }

  // The last figures stay if they cannot be read.
  async function refresh() {
    if (!Session.isOpen()) return;
    try {
      await load();
    } catch (error) {
      if (Session.isOpen()) by("who").textContent = error.message;
    }
  }

  async function open() {
    await load();
    display(true);
    by("limits-title").focus();
    Usage.show(by("usage"));
    // One after the other, since a key may have a limit of few requests per second.
    for (const part of [TryIt.models, Lists.keys, Lists.jobs]) await part().catch(() => {});
  }

  function display(signedIn) {
    for (const id of ["account", "who", "sign-out"]) by(id).hidden = !signedIn;
    by("sign-in").hidden = signedIn;
  }

  // Removes the key and all that was read with it from the page.
  function signOut(error) {
    Session.end();
    me = null;
    if (by("dialog").open) by("dialog").close();
    for (const part of [Usage, Lists, TryIt]) part.clear();
    for (const id of ["limits", "who"]) by(id).replaceChildren();
    display(false);
    by("sign-in-fault").replaceChildren(...coded(error?.message ?? ""));
    by("key").focus();
  }

  async function signIn(event) {
    event.preventDefault();
    const text = by("key").value.trim();
    by("sign-in-form").reset();
    by("sign-in-fault").textContent = "";
    try {
      Session.begin(text);
      await open();
    } catch (error) {
      signOut(error);
    }
  }

  for (const each of document.querySelectorAll("#examples-title ~ pre")) {
    each.textContent = each.textContent.replaceAll("https://inference.example", location.origin);
  }
  by("sign-in-form").addEventListener("submit", signIn);
  by("sign-out").addEventListener("click", () => signOut());
  Session.onEnd(signOut);
  setInterval(() => document.hidden || me === null || refresh(), REFRESH_MS);
  if (Session.isOpen()) open().catch(signOut);
  else by("key").focus();

  return { refresh, keyId: () => me?.key_id };
})();
