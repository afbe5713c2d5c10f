// The dashboard: receives one document a second and shows it. Unknown values are shown as unknown, never as zero.
"use strict";

(() => {
  const BASE = "/internal/dashboard";
  const DAY = 24 * 60;
  const RANGES = [5, 15, 60, DAY, 7 * DAY];
  const DAYS_EVERY_MS = 5 * 60 * 1000;
  const by = (id) => document.getElementById(id);
  const { element, clock, processName } = Format;
  const query = new URLSearchParams(location.search);
  const wall = query.has("wall") || query.get("tv") === "1"; // tv: the name in earlier versions.
  let source = null;
  let daysWanted = "";
  let state = null;
  let receivedAt = null;
  let minutes = RANGES.includes(Number(query.get("range"))) ? Number(query.get("range")) : 15;
  let log = query.get("axis") === "log";
  let pool = query.get("pool") ?? "";

  // --- data -----------------------------------------------------------------------------------------------------------

  const figures = () => state.pools.find((each) => each.name === pool) ?? state;

  function receiveState(message) {
    state = JSON.parse(message.data);
    receivedAt = performance.now();
    Past.add(state, figures());
    show();
  }

  // The history of days, for ranges longer than an hour. Without it, the hour is shown.
  async function loadDays() {
    if (minutes < DAY || document.hidden) return;
    const wanted = `${BASE}/history?days=${minutes / DAY}&pool=${encodeURIComponent(pool)}`;
    if (daysWanted !== wanted) Past.loadDays([]);
    daysWanted = wanted;
    const rows = await fetch(wanted).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
    if (!rows || daysWanted !== wanted) return;
    Past.loadDays(rows);
    if (state) showCharts();
  }

  function connect() {
    if (source || document.hidden) return;
    source = new EventSource(`${BASE}/events${pool ? `?pool=${encodeURIComponent(pool)}` : ""}`);
    source.addEventListener("history", (message) => Past.load(JSON.parse(message.data)));
    source.addEventListener("state", receiveState);
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) rejected();
    });
  }

  function disconnect() {
    if (source) source.close();
    source = null;
  }

  // Not a lost connection but a response: the session has expired, or too many pages are open.
  async function rejected() {
    disconnect();
    const answer = await fetch(BASE, { headers: { Accept: "text/html" } }).catch(() => null);
    if (answer && answer.status === 401) location.reload();
    else setTimeout(connect, 3000);
  }

  // --- view -----------------------------------------------------------------------------------------------------------

  function options(place, names, label = (name) => name) {
    if ([...place.options].map((option) => option.value).join() === names.join()) return;
    const chosen = place.value;
    place.replaceChildren(...names.map((name) => Object.assign(element("option", label(name)), { value: name })));
    if (names.includes(chosen)) place.value = chosen;
  }

  function showPools() {
    by("pool-line").hidden = state.pools.length === 0;
    options(by("pool"), ["", ...state.pools.map((each) => each.name)], (name) => name || "all pools");
    by("pool").value = figures() === state ? "" : pool;
  }

  function showCharts() {
    const rangeMs = minutes * 60000;
    const points = Past.within(rangeMs);
    const events = Past.eventsWithin(rangeMs, pool);
    options(by("latency-tier"), figures().tiers.map((tier) => tier.name));
    Tiers.show(figures(), points);
    Events.show(events);
    Charts.show(points, figures().tiers, by("latency-tier").value, { rangeMs, log, events });
  }

  function showAge() {
    StatusPanel.showAge(state, receivedAt === null ? null : performance.now() - receivedAt);
  }

  function show() {
    StatusPanel.showStatus(state);
    showAge();
    StatusPanel.showFigures(state, figures());
    showPools();
    showCharts();
    Workers.show(state, pool);
    Errors.show(figures());
    DeadLetters.show(state);
    Customers.show(state.customers);
    Details.show(state);
    by("source").textContent = `As ${processName(state.gateway)} reports at ${clock(state.at_ms)}. Gateways: ${state.gateways.map(processName).join(", ") || "none"}.`;
  }

  // --- controls -------------------------------------------------------------------------------------------------------

  function remember(name, value) {
    if (value) query.set(name, value);
    else query.delete(name);
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  }

  function choose(name, value) {
    for (const button of document.querySelectorAll(`#toolbar [data-${name}]`)) {
      button.setAttribute("aria-pressed", String(button.dataset[name] === value));
    }
    if (state) showCharts();
  }

  function chooseRange(value) {
    minutes = Number(value);
    loadDays();
    remember("range", minutes === 15 ? "" : value);
    choose("range", value);
  }

  function chooseAxis(value) {
    log = value === "log";
    remember("axis", log ? "log" : "");
    choose("axis", value);
  }

  function choosePool() {
    pool = by("pool").value;
    remember("pool", pool);
    disconnect();
    connect();
    loadDays();
  }

  for (const button of document.querySelectorAll("#toolbar [data-range]")) button.addEventListener("click", () => chooseRange(button.dataset.range));
  for (const button of document.querySelectorAll("#toolbar [data-axis]")) button.addEventListener("click", () => chooseAxis(button.dataset.axis));
  by("pool").addEventListener("change", choosePool);
  by("latency-tier").addEventListener("change", () => state && showCharts());
  by("leave").addEventListener("click", async () => {
    await fetch(`${BASE}/session`, { method: "DELETE" }).catch(() => null);
    location.reload();
  });
  addEventListener("resize", () => state && showCharts());
  addEventListener("hashchange", () => state && showCharts()); // The charts may have been hidden.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : (connect(), loadDays())));
  document.body.classList.toggle("wall", wall);
  chooseRange(String(minutes));
  chooseAxis(log ? "log" : "linear");
  Details.open();
  setInterval(showAge, 500);
  setInterval(loadDays, DAYS_EVERY_MS);
  connect();
})();
