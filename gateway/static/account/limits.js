// The limits of the key and what is used of them, as GET /v1/me has them. An unknown figure is shown as unknown.
"use strict";

const Limits = (() => {
  const { element, sentence, replace } = Format;
  const UNITS = { requests: "requests", tokens: "tokens", "gpu-s": "GPU seconds", usd: "USD" };

  function figure(value, unit) {
    const digits = unit === "usd" ? 2 : value % 1 ? 1 : 0;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function duration(ms) {
    const minutes = Math.ceil(ms / 60000);
    if (minutes < 2) return `${Math.ceil(ms / 1000)} s`;
    const parts = [[Math.floor(minutes / 1440), "d"], [Math.floor(minutes / 60) % 24, "h"], [minutes % 60, "min"]];
    const first = parts.findIndex(([count]) => count > 0);
    return parts.slice(first, first + 2).filter(([count]) => count > 0).map(([count, unit]) => `${count} ${unit}`).join(" ");
  }

  // A limit with a bar of what is used. `left`: null if it is not known.
  function bar(name, most, left, unit, note) {
    const used = left === null ? null : Math.max(0, most - left);
    const share = used === null || !most ? 0 : used / most;
    const node = element("div", undefined, `limit${share >= 1 ? " full" : share >= 0.8 ? " near" : ""}`);
    const line = element("p");
    const word = UNITS[unit] ?? unit;
    line.append(element("span", name), element("span", used === null ? `unknown of ${figure(most, unit)} ${word}` : `${figure(used, unit)} of ${figure(most, unit)} ${word} used`, "used"));
    const progress = Object.assign(element("progress"), { max: 1, value: Math.min(1, share) });
    progress.setAttribute("aria-label", name);
    node.append(line, progress);
    if (note) node.append(element("p", note, "soft"));
    return node;
  }

  function quota({ quota: period, unit, amount, remaining, reset_ms: reset }) {
    const note = reset === null ? "" : `Resets in ${duration(reset)}, on ${new Date(Date.now() + reset).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}.`;
    return bar(`${unit === "usd" ? "Budget" : "Quota"} per ${period}`, amount, remaining, unit, note);
  }

  function show(me) {
    const { effective, base, reason } = me.limits;
    const { remaining } = me;
    const nodes = [];
    if (reason) nodes.push(sentence("p", reason, "warn"));
    const per = `${figure(effective.requests_per_second)} per second${effective.requests_per_second < base.requests_per_second ? `, ${figure(base.requests_per_second)} without the reduction` : ""}.`;
    nodes.push(bar("Request rate", effective.burst, remaining.requests, "requests", `${per} The bar is the burst, which refills at this rate.`));
    if (effective.tokens_per_minute !== null) nodes.push(bar("Tokens per minute", effective.tokens_per_minute, remaining.tokens, "tokens"));
    if (effective.max_concurrency !== null) nodes.push(bar("Concurrent requests", effective.max_concurrency, remaining.concurrency, "requests"));
    nodes.push(...remaining.quotas.map(quota));
    const wait = me.max_queue_ms === null ? "as long as the model's pool allows" : `at most ${Format.time(me.max_queue_ms)}`;
    nodes.push(element("p", `A request waits in the queue ${wait}.`, "soft"));
    if (me.as_of !== "now") nodes.push(element("p", "Redis is not responding: these figures are estimates.", "warn"));
    if (me.models) nodes.push(element("p", `Models of this key: ${me.models.join(", ")}.`, "soft"));
    replace(document.getElementById("limits"), nodes);
  }

  return { show };
})();
