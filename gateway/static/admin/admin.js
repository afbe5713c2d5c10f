// The page for admins: sign-in, and views that the part of the address after # names: #customer?name=acme.
"use strict";

(() => {
  const by = (id) => document.getElementById(id);
  const { element } = Format;
  const VIEWS = { customers: Customers.all, customer: Customers.one, requests: Requests.all, request: Requests.one, tiers: Tiers.all, tier: Tiers.one, workers: Workers.all };
  const OF_NAVIGATION = { customer: "customers", request: "requests", tier: "tiers" };
  let turn = 0;
  let key = null;

  // --- views ----------------------------------------------------------------------------------------------------------

  function place() {
    const [name, query] = location.hash.slice(1).split("?");
    return Object.hasOwn(VIEWS, name) ? { name, query: Object.fromEntries(new URLSearchParams(query)) } : { name: "customers", query: {} };
  }

  async function render(refresh) {
    const { name, query } = place();
    const mine = (turn += 1);
    let shown;
    try {
      shown = await VIEWS[name](query, () => render(true));
    } catch (error) {
      if (!Api.session()) return;
      shown = { title: by("view-title").textContent || "Tierlane admin", nodes: [element("p", error.message, "bad")] };
    }
    if (mine !== turn) return;
    by("view-title").textContent = shown.title;
    document.title = `${shown.title} · Tierlane admin`;
    by("view-body").replaceChildren(...shown.nodes);
    by("view-body").removeAttribute("aria-busy");
    if (refresh) restoreFocus();
  }

  // To the button that was used last, which is a new element after a refresh.
  function restoreFocus() {
    if (by("dialog").open || document.activeElement !== document.body) return;
    const used = [...document.querySelectorAll("#view [data-key]")].find((each) => each.dataset.key === key);
    (used ?? by("view-title")).focus();
  }

  function open() {
    const { name } = place();
    for (const each of document.querySelectorAll("nav a")) {
      if (each.hash === `#${OF_NAVIGATION[name] ?? name}`) each.setAttribute("aria-current", "page");
      else each.removeAttribute("aria-current");
    }
    by("view-title").textContent = name.replace(/^./, (first) => first.toUpperCase());
    by("view-body").replaceChildren(element("p", "Loading …", "soft"));
    by("view-body").setAttribute("aria-busy", "true");
    by("view-title").focus();
    scrollTo(0, 0);
    return render(false);
  }

  function lookUp(event) {
    event.preventDefault();
    const name = by("look-up-name").value.trim();
    if (name) Parts.go(...(/^req_[0-9a-f]{32}$/.test(name) ? ["request", { id: name }] : ["customer", { name }]));
  }

  // --- sign-in --------------------------------------------------------------------------------------------------------

  function enter() {
    const { operator, role } = Api.session();
    by("sign-in").hidden = true;
    by("top").hidden = by("view").hidden = false;
    by("operator").textContent = `${operator} (${role})`;
    return open();
  }

  async function leave(text = "") {
    turn += 1;
    if (by("dialog").open) by("dialog").close();
    by("top").hidden = by("view").hidden = true;
    by("view-body").replaceChildren();
    by("sign-in").hidden = false;
    by("sign-in-fault").textContent = text;
    by("token").focus();
    const { oidc } = await Api.get("/sign-in").catch(() => ({ oidc: false }));
    by("sign-in-oidc").hidden = !oidc;
  }

  async function signIn(event) {
    event.preventDefault();
    by("sign-in-fault").textContent = "";
    const token = by("token").value.trim();
    try {
      await Api.signIn(token);
      by("token").value = "";
      await enter();
    } catch (error) {
      by("sign-in-fault").textContent = error.message;
    }
  }

  async function signOut() {
    try {
      await Api.signOut();
      leave();
    } catch (error) {
      Dialog.notify(error.message, "bad");
    }
  }

  Api.onEnd(() => leave("The session has ended: sign in again."));
  addEventListener("hashchange", () => Api.session() && open());
  by("view").addEventListener("focusin", (event) => (key = event.target.dataset.key ?? key));
  by("dialog").addEventListener("close", restoreFocus);
  by("look-up").addEventListener("submit", lookUp);
  by("sign-in-form").addEventListener("submit", signIn);
  by("leave").addEventListener("click", signOut);
  by("times").textContent = `Times are those of this browser (${Intl.DateTimeFormat().resolvedOptions().timeZone}).`;
  Api.resume().then((found) => (found ? enter() : leave()), (error) => leave(error.message));
})();
