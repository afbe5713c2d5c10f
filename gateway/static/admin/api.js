// Requests to the admin API, the operator who is signed in, and what the role allows.
"use strict";

const Api = (() => {
  const BASE = "/admin/v1";
  const PART = 1000;
  const { roles, actions } = JSON.parse(document.querySelector("meta[name=roles]").content);
  let session = null;
  let ended = () => {};

  // Throws an error with the sentence of the API, and its `status`, `code` and `param`.
  async function send(method, path, body, headers = {}) {
    const init = { method, headers: { "X-Tierlane-Request": "1", ...headers } };
    if (body !== undefined) {
      init.headers["Content-Type"] = "application/json";
      init.body = JSON.stringify(body);
    }
    const answer = await fetch(BASE + path, init).catch(() => {
      throw new Error("The admin API is not responding.");
    });
    const found = answer.status === 204 ? null : await answer.json().catch(() => null);
    if (!answer.ok) {
      if (answer.status === 401 && session) {
        session = null;
        ended();
      }
      const error = found?.error ?? { message: `The response has the status ${answer.status}.` };
      throw Object.assign(new Error(error.message), { status: answer.status, code: error.code, param: error.param });
    }
    return { found, etag: answer.headers.get("ETag") };
  }

  // Without parameters that are empty.
  function queryText(query) {
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
    return given.length ? `?${new URLSearchParams(given)}` : "";
  }

  const get = async (path, query = {}) => (await send("GET", path + queryText(query))).found;

  // All rows of a list, in parts; `most` bounds the parts.
  async function all(path, query = {}, most = 20) {
    const rows = [];
    let after;
    for (let part = 0; part < most; part += 1) {
      const { data, next } = await get(path, { ...query, limit: PART, after });
      rows.push(...data);
      if (next === null) return rows;
      after = next;
    }
    throw new Error(`There are more than ${(most * PART).toLocaleString("en")} rows: choose a shorter time.`);
  }

  async function signIn(token) {
    session = (await send("POST", "/session", undefined, token ? { Authorization: `Bearer ${token}` } : {})).found;
  }

  // Whether the cookie is that of a session.
  async function resume() {
    try {
      session = await get("/session");
    } catch (error) {
      if (error.status !== 401) throw error;
    }
    return Boolean(session);
  }

  async function signOut() {
    await send("DELETE", "/session");
    session = null;
  }

  const needed = (action) => actions[action];
  const may = (action) => roles.indexOf(session?.role) >= roles.indexOf(needed(action));

  return { send, get, all, signIn, resume, signOut, queryText, needed, may, onEnd: (act) => (ended = act), session: () => session };
})();
