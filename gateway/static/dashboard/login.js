// Changes the service token for a session cookie; the token is sent once, in a header, and kept nowhere.
"use strict";

(() => {
  const PAGE = "/internal/dashboard";
  const TRIED = "tierlane-tried";
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
        sessionStorage.removeItem(TRIED);
        location.reload();
        return;
      }
      const said = await answer.json();
      fault.textContent = answer.status === 401 ? "This is not the service token." : said.error.message;
    } catch (error) {
      fault.textContent = `The gateway does not answer: ${error.message}`;
    }
  }

  // A link from another site brings no strict cookie along, though this browser may have one: look once more from here.
  async function lookAgain() {
    if (sessionStorage.getItem(TRIED)) return;
    sessionStorage.setItem(TRIED, "yes");
    const answer = await fetch(PAGE, { headers: { Accept: "text/html" } });
    if (answer.ok) location.reload();
  }

  form.addEventListener("submit", logIn);
  if (document.referrer === "" || !document.referrer.startsWith(location.origin)) lookAgain().catch(() => {});
  field.focus();
})();
