// Exchanges the service token for a session cookie; the token is sent once, in a header, and not stored.
"use strict";

(() => {
  const PAGE = "/internal/dashboard";
  const RETRIED = "tierlane-tried";
  const form = document.getElementById("login");
  const field = document.getElementById("token");
  const fault = document.getElementById("fault");

  async function logIn(event) {
    event.preventDefault();
    fault.textContent = "";
    try {
      const headers = { Authorization: `Bearer ${field.value.trim()}` };
      const answer = await fetch(`${PAGE}/session`, { method: "POST", headers });
      if (answer.ok) {
        sessionStorage.removeItem(RETRIED);
        location.reload();
        return;
      }
      const body = await answer.json();
      fault.textContent = answer.status === 401 ? "This is not the service token." : body.error.message;
    } catch (error) {
      fault.textContent = `The gateway is not responding: ${error.message}`;
    }
  }

  // With a link from another site the browser sends no strict cookie, though it may have one: try once more from here.
  async function retry() {
    if (sessionStorage.getItem(RETRIED)) return;
    sessionStorage.setItem(RETRIED, "yes");
    const answer = await fetch(PAGE, { headers: { Accept: "text/html" } });
    if (answer.ok) location.reload();
  }

  form.addEventListener("submit", logIn);
  if (document.referrer === "" || !document.referrer.startsWith(location.origin)) retry().catch(() => {});
  field.focus();
})();
