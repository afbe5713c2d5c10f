// The header with the status, the reasons with what to do, and the key figures.
"use strict";

const StatusPanel = (() => {
  const SILENT_MS = 3000;
  const MAX_AGE_S = 2;
  const by = (id) => document.getElementById(id);
  const { element, coded, sentence, count, percent, time, replace } = Format;

  function problemNode(problem) {
    const node = element("li");
    node.append(sentence("p", problem.reason));
    const line = element("p", "", "action");
    line.append(...coded(problem.action ?? ""));
    if (problem.runbook) line.append(" ", runbook(problem.runbook));
    if (line.textContent) node.append(line);
    return node;
  }

  // A link to the page of the runbook at this gateway; the text itself if it is not the path of a runbook.
  function runbook(path) {
    const [, name] = path.match(/^docs\/runbooks\/(\w+)\.md$/) ?? [];
    const node = element(name ? "a" : "code", name ? `Runbook: ${name}` : path);
    if (name) node.href = `/internal/runbooks/${name}`;
    return node;
  }

  function showStatus(state) {
    if (by("level").textContent !== state.status) by("level").textContent = state.status;
    by("status").className = state.status;
    replace(by("reasons"), state.problems.length ? state.problems.map(problemNode) : [element("li", "All tiers at full limits; all GPUs healthy.")]);
    by("installation").textContent = state.installation;
    by("installation").hidden = !state.installation;
    document.title = [state.status.toUpperCase(), state.installation, "Tierlane"].filter(Boolean).join(" · ");
  }

  // `silentMs`: since the last state; null before the first.
  function showAge(state, silentMs) {
    const silent = silentMs === null || silentMs > SILENT_MS;
    by("age").textContent = silentMs === null ? "no data" : silent ? `no data for ${time(silentMs)}` : "live";
    by("age").className = silent ? "bad" : "good";
    by("status").classList.toggle("stale", silent);
    if (state) showOutage(state, silent ? silentMs : 0);
  }

  function showOutage(state, silentMs) {
    const ageS = state.look_age_s === null ? null : state.look_age_s + silentMs / 1000;
    const stale = state.redis_problem !== null || ageS === null || ageS > MAX_AGE_S;
    const age = ageS === null ? "there are no figures yet" : `these figures are ${ageS.toFixed(1)} s old`;
    by("outage").hidden = !stale;
    document.querySelector("main").classList.toggle("old", stale);
    by("outage").textContent = state.redis_problem === null ? `No new data: ${age}.` : `Redis is not responding: ${age}.`;
  }

  // No remark where the capacity is measured or fixed.
  const evidence = (figures) => ({ probing: "probing", prior: "estimate" })[figures.capacity_evidence] ?? "";

  const short = (value) => (value >= 99999.5 ? `${count(value / 1000)}k` : count(value));
  const rate = (value) => `${short(value)}/s`;

  // A long one may be continued in a second line after the stroke.
  const ratio = (part, whole) => `${part}/${part.length + whole.length > 5 ? "\u200b" : ""}${whole}`;

  const FILL = ["batch fill", "Fill of the batches, of their maximum size", (s) => (s.batch_fill === null ? "–" : percent(s.batch_fill))];
  const SLOTS = ["running", "Requests that run, of those that may run at a time", (s) => ratio(count(s.running), count(s.slots))];

  // An entry may be a function that selects it.
  const KPIS = [
    ["in", "Valid requests, over all gateways", (s) => rate(s.in_rps)],
    ["out", "Responses with an output", (s) => rate(s.out_rps)],
    ["rejected", "Rejected for lack of capacity", (s) => rate(s.shed_rps), (s) => (s.shed_rps > 0.5 ? "warn" : "")],
    ["demand", "What the base limits of the customers would accept", (s) => rate(s.demand_rps)],
    ["capacity", "Rate of the healthy GPUs; if they have no slots, multiplied by target_utilization", (s) => rate(s.capacity_rps),
      (s) => (s.capacity_rps < s.demand_rps && s.capacity_evidence !== "prior" ? "bad" : ""), evidence],
    ["GPUs healthy", "Workers that make progress, of all known", (s) => (s.total_gpus ? ratio(count(s.healthy_gpus), count(s.total_gpus)) : null),
      (s) => (s.healthy_gpus < s.total_gpus ? "bad" : "good")],
    ["GPU busy", "Share of the last two seconds in which the models ran, or of the slots in use", (s) => (s.healthy_gpus ? percent(s.gpu_utilization) : null)],
    (figures) => (figures.slots ? SLOTS : FILL),
    ["waiting", "Requests in all tier queues", (s) => short(s.queue_depth)],
    ["dead letters", "Requests whose retries are used up", (s) => short(s.dlq), (s) => (s.dlq ? "warn" : "")],
  ];
  const AUDIT = ["audit lag", "Age of the oldest record that PostgreSQL does not have", (s) => (s.audit_lag_ms === null ? null : time(s.audit_lag_ms)),
    (s) => (s.audit_lag_ms > 10000 ? "bad" : "")];

  const BATCHES = ["batch lines", "Lines of open batches that have not ended, and the batches", (s) => `${short(s.batches.lines)} in ${count(s.batches.batches)}`];

  // `remark`: what is to be known about the figure, below it.
  function box([label, meaning, value, level, remark], figures) {
    const node = element("div");
    const shown = value(figures);
    node.title = meaning;
    node.append(element("dt", label), element("dd", shown ?? "no data", shown === null ? "bad" : level ? level(figures) : ""));
    if (remark?.(figures)) node.append(element("dd", remark(figures), "remark"));
    return node;
  }

  function showFigures(state, figures) {
    by("kpis").replaceChildren(...KPIS.map((each) => box(typeof each === "function" ? each(figures) : each, figures)), box(AUDIT, state));
    if (state.batches?.batches) by("kpis").append(box(BATCHES, state));
  }

  return { showStatus, showAge, showFigures };
})();
