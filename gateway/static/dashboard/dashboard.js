// The page for on-call: hears one document a second and shows it. What is not known is said in red; nothing is made up.
"use strict";

(() => {
  const BASE = "/internal/dashboard";
  const SPAN_MS = 15 * 60 * 1000;
  const SILENT_MS = 3000;
  const OLD_LOOK_S = 2;
  const MOST_EVENTS = 200;

  const by = (id) => document.getElementById(id);
  let source = null;
  let state = null;
  let heardAt = null;
  let points = [];
  let events = [];

  const { element, count, percent, time, clock, shedShare } = Words;

  // --- what was heard -------------------------------------------------------------------------------------------------

  function pointOf(document) {
    const tiers = {};
    for (const tier of document.tiers) {
      tiers[tier.name] = { depth: tier.depth, in: tier.in_rps, out: tier.out_rps, shed: tier.shed_rps, failed: tier.failed_rps, ratio: tier.limit_ratio,
        p50: tier.p50_ms, p95: tier.p95_ms, p99: tier.p99_ms };
    }
    return { at: document.at_ms, demand: document.demand_rps, capacity: document.capacity_rps, tiers };
  }

  function pointOfMoment([at, , demand, capacity, rows]) {
    const tiers = {};
    for (const [name, depth, , into, out, shed, ratio, p50, p95, p99, failed] of rows) {
      tiers[name] = { depth, in: into, out, shed, failed, ratio, p50, p95, p99 };
    }
    return { at, demand, capacity, tiers };
  }

  function hearHistory(message) {
    const moments = JSON.parse(message.data);
    points = moments.map(pointOfMoment);
    events = moments.flatMap((moment) => moment[5]);
    showEvents();
  }

  function hearState(message) {
    state = JSON.parse(message.data);
    heardAt = performance.now();
    if (!points.length || state.at_ms > points[points.length - 1].at) points.push(pointOf(state));
    while (points.length && points[0].at < state.at_ms - SPAN_MS) points.shift();
    if (state.events.length) {
      events = [...events, ...state.events].slice(-MOST_EVENTS);
      showEvents();
    }
    show();
  }

  function listen() {
    if (source || document.hidden) return;
    source = new EventSource(`${BASE}/events`);
    source.addEventListener("history", hearHistory);
    source.addEventListener("state", hearState);
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) refused();
    });
  }

  function hush() {
    if (source) source.close();
    source = null;
  }

  // Not a break in the line but an answer: the session is over, or there are too many readers.
  async function refused() {
    hush();
    const answer = await fetch(BASE, { headers: { Accept: "text/html" } }).catch(() => null);
    if (answer && answer.status === 401) location.reload();
    else setTimeout(listen, 3000);
  }

  // --- what is shown --------------------------------------------------------------------------------------------------

  function showStatus() {
    by("level").textContent = state.status;
    by("status").className = state.status;
    const lines = state.reasons.length ? state.reasons : ["Every tier has its limits, every GPU serves."];
    by("reasons").replaceChildren(...lines.map((line) => element("p", line)));
    document.title = `${state.status.toUpperCase()} · Tierlane`;
  }

  function showAge() {
    const heardMs = heardAt === null ? null : performance.now() - heardAt;
    const silent = heardMs === null || heardMs > SILENT_MS;
    by("age").textContent = heardMs === null ? "no data" : silent ? `no news for ${time(heardMs)}` : "live";
    by("age").className = silent ? "bad" : "good";
    by("status").classList.toggle("stale", silent);
    if (state) showOutage(silent ? heardMs : 0);
  }

  function showOutage(silentMs) {
    const ageS = state.look_age_s === null ? null : state.look_age_s + silentMs / 1000;
    const away = state.redis_problem !== null || ageS === null || ageS > OLD_LOOK_S;
    const age = ageS === null ? "nothing was ever seen" : `these figures are ${ageS.toFixed(1)} s old`;
    by("outage").hidden = !away;
    document.querySelector("main").classList.toggle("old", away);
    by("outage").textContent = state.redis_problem === null ? `Nothing new: ${age}.` : `Redis does not answer: ${age}.`;
  }

  // Nothing where the capacity is measured or fixed: then the figure needs no caveat.
  function evidence(s) {
    return { probing: " (probing)", prior: " (a guess)" }[s.capacity_evidence] ?? "";
  }

  const KPIS = [
    ["in", "Valid requests of known keys, over all gateways", (s) => `${count(s.in_rps)}/s`],
    ["out", "Answers with an output", (s) => `${count(s.out_rps)}/s`],
    ["shed", "Refused for want of capacity", (s) => `${count(s.shed_rps)}/s`, (s) => (s.shed_rps > 0.5 ? "warn" : "")],
    ["demand", "What the customers' base limits would let through", (s) => `${count(s.demand_rps)}/s`],
    ["capacity", "What the healthy GPUs can do, times target_utilization", (s) => `${count(s.capacity_rps)}/s${evidence(s)}`,
      (s) => (s.capacity_rps < s.demand_rps && s.capacity_evidence !== "prior" ? "bad" : "")],
    ["GPUs healthy", "Workers that make progress, of all known", (s) => (s.total_gpus ? `${s.healthy_gpus}/${s.total_gpus}` : null),
      (s) => (s.healthy_gpus < s.total_gpus ? "bad" : "good")],
    ["GPU busy", "Share of the last two seconds in which the models ran", (s) => (s.healthy_gpus ? percent(s.gpu_utilization) : null)],
    ["batch fill", "How full batches are, of what the model takes at once", (s) => (s.batch_fill === null ? "–" : percent(s.batch_fill))],
    ["waiting", "Requests in all tier queues", (s) => count(s.queue_depth)],
    ["dead letters", "Requests that were given up for good", (s) => count(s.dlq), (s) => (s.dlq ? "warn" : "")],
    ["audit lag", "Age of the oldest entry that PostgreSQL does not have", (s) => (s.audit_lag_ms === null ? null : time(s.audit_lag_ms)),
      (s) => (s.audit_lag_ms > 10000 ? "bad" : "")],
  ];

  function showKpis() {
    by("kpis").replaceChildren(...KPIS.map(([label, meaning, value, level]) => {
      const box = element("div");
      const shown = value(state);
      box.title = meaning;
      box.append(element("span", label), element("b", shown ?? "no data", shown === null ? "bad" : level ? level(state) : ""));
      return box;
    }));
  }

  function spark(name, at) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const end = state.at_ms;
    const values = points.map((point) => [point.at, point.tiers[name]?.out ?? 0]);
    const most = Math.max(1, ...values.map(([, value]) => value));
    line.setAttribute("points", values.map(([when, value]) =>
      `${(100 - ((end - when) / SPAN_MS) * 100).toFixed(1)},${(23 - (value / most) * 22).toFixed(1)}`).join(" "));
    line.setAttribute("class", `tier-${Math.min(at, 4)}`);
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(line);
    return svg;
  }

  // A tier that nobody asks has no answer times; one that is asked and has none is a fault.
  function percentile(tier, value) {
    if (value !== null) return [time(value), ""];
    return tier.in_rps > 0 ? ["no data", "bad"] : ["–", "soft"];
  }

  function tierRow(tier, at) {
    const row = element("tr");
    const shed = shedShare(tier);
    const cells = [
      [tier.name, `tier-${Math.min(at, 4)}`],
      [count(tier.depth), ""],
      [time(tier.oldest_ms), tier.oldest_ms > 1000 ? "warn" : ""],
      [count(tier.in_rps), ""],
      [count(tier.out_rps), ""],
      [percent(shed), shed > 0.02 ? "warn" : "soft"],
      Promises.cell(points, tier.name),
      [percent(tier.limit_ratio), tier.limit_ratio < 0.995 ? "warn" : ""],
      percentile(tier, tier.p50_ms), percentile(tier, tier.p95_ms), percentile(tier, tier.p99_ms),
      [`${percent(tier.share)} / ${percent(tier.guaranteed_share)}`, ""],
    ];
    for (const [text, className] of cells) row.append(element("td", text, className));
    const last = element("td");
    last.append(spark(tier.name, at));
    row.append(last);
    return row;
  }

  function showTiers() {
    document.querySelector("#tiers tbody").replaceChildren(...state.tiers.map(tierRow));
    const names = state.tiers.map((tier) => tier.name);
    const choice = by("latency-tier");
    if ([...choice.options].map((option) => option.value).join() !== names.join()) {
      choice.replaceChildren(...names.map((name) => element("option", name)));
    }
    Charts.show(points, names, choice.value);
  }

  function showEvents() {
    const latest = [...events].sort((a, b) => b[0] - a[0]).slice(0, MOST_EVENTS);
    const lines = latest.map(([at, level, text]) => {
      const line = element("li");
      line.append(element("time", clock(at)), element("span", text, level === "news" ? "" : level));
      return line;
    });
    by("events").replaceChildren(...(lines.length ? lines : [element("li", "Nothing in the last 15 minutes.", "soft")]));
  }

  function show() {
    showStatus();
    showAge();
    showKpis();
    showTiers();
    Workers.show(state);
    Letters.show(state);
    Customers.show(state.customers);
    by("source").textContent = `As ${state.gateway} sees it, at ${clock(state.at_ms)}. Gateways: ${state.gateways.join(", ") || "none known"}.`;
  }

  by("leave").addEventListener("click", async () => {
    await fetch(`${BASE}/session`, { method: "DELETE" }).catch(() => null);
    location.reload();
  });
  by("latency-tier").addEventListener("change", () => state && showTiers());
  addEventListener("resize", () => state && showTiers());
  document.addEventListener("visibilitychange", () => (document.hidden ? hush() : listen()));
  document.body.classList.toggle("tv", new URLSearchParams(location.search).get("tv") === "1");
  setInterval(showAge, 500);
  listen();
})();
