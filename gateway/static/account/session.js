// The key of the customer, and requests with it. It is in the memory of the page and in sessionStorage, which ends with the
// tab, and is sent only in a header.
"use strict";

const Session = (() => {
  const NAME = "tierlane-key";
  const TIMEOUT_MS = 20000;
  const MOST_REPEATS = 4;
  const LONGEST_WAIT_MS = 5000;
  let key = stored((storage) => storage.getItem(NAME));
  let ended = () => {};

  // A browser may forbid the storage: the key then ends with the page.
  function stored(use) {
    try {
      return use(sessionStorage);
    } catch {
      return null;
    }
  }

  function begin(text) {
    if (!/^[!-~]+$/.test(text)) throw new Error("This is not an API key: a key begins with tl_ and has no spaces.");
    key = text;
    stored((storage) => storage.setItem(NAME, text));
  }

  function end() {
    key = null;
    stored((storage) => storage.removeItem(NAME));
  }

  async function fault(answer) {
    const error = (await answer.json().catch(() => null))?.error;
    const wait = answer.headers.get("Retry-After");
    const text = error?.message ?? `The gateway returned the status ${answer.status}.`;
    const shown = new Error(wait && answer.status !== 401 ? `${text} Retry after ${wait} s.` : text);
    const waitMs = wait === null ? Infinity : Number(wait) * 1000;
    return Object.assign(shown, { status: answer.status, waitMs, code: error?.code, requestId: error?.request_id ?? answer.headers.get("x-request-id") });
  }

  // The response of a request that succeeded. Throws an error whose text is the gateway's own sentence. A key that is not valid
  // any more ends the session.
  async function send(path, { method = "GET", body, signal = AbortSignal.timeout(TIMEOUT_MS) } = {}) {
    const used = key;
    const headers = { Authorization: `Bearer ${used}`, ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
    let answer = null;
    try {
      answer = await fetch(path, { method, headers, signal, cache: "no-store", credentials: "omit", body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The gateway is not responding.");
    }
    if (answer.ok) return answer;
    const shown = await fault(answer);
    if (answer.status === 401 && key === used) ended(shown);
    throw shown;
  }

  // The document of a response, unless the session ended meanwhile. A reading that a limit rejects for a short time is repeated.
  async function read(path, options) {
    const used = key;
    for (let left = MOST_REPEATS; ; left--) {
      try {
        const found = await (await send(path, options)).json();
        if (key === used) return found;
      } catch (error) {
        if (options?.method || error.status !== 429 || !(error.waitMs <= LONGEST_WAIT_MS) || !left) throw error;
        await new Promise((done) => setTimeout(done, error.waitMs));
      }
      if (key !== used) throw new DOMException("Signed out.", "AbortError");
    }
  }

  return { begin, end, send, read, isOpen: () => key !== null, onEnd: (act) => (ended = act) };
})();
