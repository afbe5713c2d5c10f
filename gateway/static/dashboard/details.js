// Views that explain one customer, request or worker. The part of the address after # names it: #customer=acme.
"use strict";

const Details = (() => {
  const by = (id) => document.getElementById(id);
  const { element, sentence, list, table, viewLink, codeLink, count, percent, time, clock, replace } = Format;
  const TITLES = { customer: "Customer", request: "Request", worker: "Worker" };
  let state = null;
  let current = null;
  let loading = 0;

  function parse(hash) {
    const [, kind, name] = hash.match(/^#(customer|request|worker)=(.+)$/) ?? [];
    if (!kind) return null;
    try {
      return { kind, name: decodeURIComponent(name) };
    } catch {
      return { kind, name };
    }
  }

  // --- parts ----------------------------------------------------------------------------------------------------------

  function code(name, messages) {
    const node = element("span");
    node.append(codeLink(name));
    if (messages[name]) node.append(sentence("span", ` ${messages[name]}`, "soft"));
    return node;
  }

  // --- views ----------------------------------------------------------------------------------------------------------

  function gpuShare(found) {
    if (!found.gpu) return "not known";
    const share = found.gpu.total_gpu_ms ? found.gpu.gpu_ms / found.gpu.total_gpu_ms : 0;
    return `${percent(share)} of the last ${found.window_s / 60} minutes (${time(found.gpu.gpu_ms)} of ${time(found.gpu.total_gpu_ms)})`;
  }

  function customer(found) {
    const rate = state?.customers.find((each) => each.name === found.name)?.rps;
    const limits = found.limits.map((each) => [each.limit, each.own ? "customer" : `tier ${found.tier}`, count(each.base),
      count(each.effective), each.left === null ? null : count(each.left)]);
    return [
      list([
        ["Tier", found.tier],
        ["Id", element("code", found.id)],
        ["Status", found.suspended ? "suspended: every request is rejected" : "active", found.suspended ? "bad" : ""],
        ["Limits in force", `${percent(found.factor)} of the base limits`, found.factor < 0.995 ? "warn" : ""],
        ["Rate now", rate === undefined ? "" : `${count(rate)}/s`],
        ["Share of GPU time", gpuShare(found)],
        ["Accepted requests", found.gpu ? `${count(found.gpu.requests)}: ${count(found.gpu.completed)} completed, ${count(found.gpu.failed)} failed` : ""],
      ]),
      ...found.not_read.map((each) => sentence("p", `Not available: ${each}`, "bad")),
      ...table("Limits", ["Limit", "Set for", "Base", "In force", "Left"], limits),
      ...(found.rejections ? table("Last rejections", ["Time", "Request", "Error", "Limit", "Limits at", "More"],
        found.rejections.map((each) => [clock(each.at_ms), viewLink("request", each.request_id), code(each.code, found.messages),
          each.limit || "–", percent(each.factor), each.more ? `+${each.more}` : ""])) : []),
      ...(found.alerts?.length ? table("Quotas that are nearly or wholly used", ["Time", "Quota", "Share", "Period ends"],
        found.alerts.map((each) => [clock(Date.parse(each.reached_at)), each.quota, percent(each.share), new Date(each.period_end).toLocaleString()])) : []),
      ...(found.failed ? table("Last failed requests (one hour)", ["Time", "Request", "Model", "Error"],
        found.failed.map((each) => [clock(Date.parse(each.created_at)), viewLink("request", each.id), each.model, code(each.error_code ?? "", found.messages)])) : []),
      element("p", `The same in a terminal: tierlane explain ${found.name}`, "soft"),
    ];
  }

  function request(found) {
    const about = [
      ["Customer", found.customer ? viewLink("customer", found.customer) : ""],
      ["Tier", found.tier],
      ["Model", found.model],
      ["Worker", found.worker ? viewLink("worker", found.worker) : ""],
    ];
    if (found.rejection) {
      const { rejection } = found;
      return [list([["Status", "rejected", "bad"], ["Time", clock(rejection.at_ms)], ["Error", code(rejection.code, found.messages)],
        ["Limit", rejection.limit], ["Limits in force", `${percent(rejection.factor)} of the base limits`], ...about])];
    }
    const { status, latency_ms: latency, error, attempts, timeline } = found.request;
    return [
      list([["Status", status, error ? "bad" : ""], ["Response time", latency === null ? "" : time(latency)],
        ["Error", error ? code(error, found.messages) : ""], ["Attempts", String(attempts)], ...about]),
      ...table("Timeline", ["Event", "Time", "After"], timeline.map((each) => [each.event, each.at, time(each.after_ms)])),
    ];
  }

  // Where to find the worker. Older workers do not report it.
  function machine({ host, pid, model_pid: modelPid, gpu }) {
    return [
      ["Host", host || "not reported"],
      ["Process", pid ? String(pid) : ""],
      ["Model process", modelPid ? String(modelPid) : ""],
      ["GPU", gpu ? [gpu.name || "not reported", gpu.address].filter(Boolean).join(", ") : "none reported"],
    ];
  }

  function worker(name) {
    const found = state?.workers.filter((each) => each.id === name) ?? [];
    const problems = (state?.problems ?? []).filter((each) => each.reason.includes(name));
    const events = Past.eventsWithin(3600000, "").filter(([, , text]) => text.includes(name)).reverse();
    return [
      ...found.flatMap((each) => [...Workers.facts(each), list(machine(each))]),
      ...(found.length ? [] : [element("p", "No worker with this id was seen in the last five minutes.", "bad")]),
      ...problems.flatMap((each) => [sentence("p", each.reason, "bad"), sentence("p", each.action)]),
      ...table("Events of the last hour", ["Time", "Event"], events.map(([at, , text]) => [clock(at), sentence("span", text)])),
      element("p", `In a terminal: tierlane gpu list. Its log: the process ${name}.`, "soft"),
    ];
  }

  // --- navigation -----------------------------------------------------------------------------------------------------

  async function load({ kind, name }) {
    if (kind === "worker") return worker(name);
    const answer = await fetch(`${Dialog.BASE}/${kind}s/${encodeURIComponent(name)}`);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error.message);
    return kind === "customer" ? customer(found) : request(found);
  }

  async function refresh() {
    const shown = current;
    if (!shown) return;
    let nodes;
    loading += 1;
    try {
      nodes = await load(shown);
    } catch (error) {
      nodes = [sentence("p", error.message, "bad")];
    } finally {
      loading -= 1;
    }
    if (shown === current) replace(by("details-body"), nodes);
  }

  function open() {
    current = parse(location.hash);
    by("details").hidden = !current;
    by("overview").hidden = Boolean(current);
    if (!current) return;
    by("details-title").textContent = `${TITLES[current.kind]} ${current.name}`;
    by("details-body").replaceChildren(element("p", "Loading …", "soft"));
    by("details").focus();
    scrollTo(0, 0);
    refresh();
  }

  function lookUp(event) {
    event.preventDefault();
    const name = by("look-up-name").value.trim();
    if (!name) return;
    const kind = /^req_[0-9a-f]{32}$/.test(name) ? "request" : state?.workers.some((each) => each.id === name) ? "worker" : "customer";
    location.hash = `${kind}=${encodeURIComponent(name)}`;
  }

  function show(next) {
    state = next;
    if (current?.kind === "worker") refresh();
  }

  addEventListener("hashchange", open);
  by("look-up").addEventListener("submit", lookUp);
  setInterval(() => document.hidden || loading || refresh(), 5000); // Each refresh reads the audit.

  return { open, show };
})();
