// Search of accepted requests in the audit, and one request with its timeline.
"use strict";

const Requests = (() => {
  const { element, sentence, list, time } = Format;
  const PART = 50;
  const names = new Map();

  // The audit has the ids of customers.
  async function nameOf(id) {
    if (!id) return null;
    if (!names.has(id)) names.set(id, Api.get(`/customers/${id}`).then((found) => found.name, () => null));
    return names.get(id);
  }

  async function customerLink(id) {
    const name = await nameOf(id);
    return name === null ? element("code", id ?? "–") : Parts.link(name, "customer", { name });
  }

  const state = (row) => element("span", row.status, row.status === "failed" ? "bad" : row.status === "completed" ? "good" : "");

  // --- search ---------------------------------------------------------------------------------------------------------

  const FIELDS = [["customer", "Customer"], ["from", "From", "datetime-local"], ["to", "To", "datetime-local"], ["error_code", "Error code"], ["model", "Model"], ["api_key_id", "Key"]];

  function filters(query) {
    const form = element("form", undefined, "filters");
    const inputs = FIELDS.map(([name, label, type]) => {
      const given = query[name] ?? "";
      const input = Object.assign(element("input"), { type: type ?? "text", name, autocomplete: "off", value: type && given ? Parts.when(given).slice(0, 16).replace(" ", "T") : given });
      const line = element("label", label);
      line.append(input);
      return line;
    });
    const status = Parts.select([["", "any"], ["failed"], ["completed"], ["queued"], ["processing"]], query.status ?? "");
    const line = element("label", "Status");
    status.name = "status";
    line.append(status);
    form.append(...inputs, line, element("button", "Search"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = [...new FormData(form)].map(([name, text]) => [name, ["from", "to"].includes(name) && text ? new Date(text).toISOString() : text.trim()]);
      Parts.go("requests", Object.fromEntries(given));
    });
    return form;
  }

  async function all(query) {
    const { data, next } = await Api.get("/requests", { ...query, limit: PART });
    const rows = await Promise.all(data.map(async (row) => [Parts.when(row.created_at), Parts.link(row.id, "request", { id: row.id }), await customerLink(row.customer_id), row.model,
      state(row), row.error_code ? element("code", row.error_code) : null, row.http_status, row.latency_ms === null ? null : time(row.latency_ms), row.worker_id]));
    const more = next === null ? [] : [Parts.link("Older requests", "requests", { ...query, after: next })];
    return { title: "Requests", nodes: [filters(query),
      ...Parts.cards(`Accepted requests${query.from ? "" : ", of a day"}, the newest first`, ["Time", "Request", "Customer", "Model", "Status", "Code", "HTTP", "Time taken", "Worker"], rows), ...more,
      sentence("p", "Rejected requests are not in the audit: the dashboard and `tierlane explain` show the last ones.", "soft")] };
  }

  // --- one request ----------------------------------------------------------------------------------------------------

  // Parts of the response time as a bar; the list below it has the figures.
  function phases(row) {
    if (row.latency_ms === null || row.queue_ms === null) return []; // Where the time went is not recorded.
    const queue = Math.min(row.queue_ms ?? 0, row.latency_ms);
    const run = Math.min(row.gpu_ms ?? 0, row.latency_ms - queue);
    const parts = [["queue", queue], ["model", run], ["other", row.latency_ms - queue - run]];
    const node = element("div", undefined, "phases");
    const bar = element("div", undefined, "phase-bar");
    bar.setAttribute("aria-hidden", "true");
    for (const [name, ms] of parts) {
      const part = element("span", undefined, name);
      part.style.flexGrow = String(ms);
      bar.append(part);
    }
    node.append(bar, element("p", parts.map(([name, ms]) => `${name} ${time(ms)}`).join(" · ")));
    return [node];
  }

  function timeline(row) {
    const start = Date.parse(row.created_at);
    const events = [["accepted", 0, `tier ${row.tier ?? "unknown"}, gateway ${row.gateway_id ?? "unknown"}`]];
    if (row.queue_ms !== null) events.push(["left the queue", row.queue_ms, row.batch_size ? `in a batch of ${row.batch_size}` : ""]);
    if (row.queue_ms !== null && row.gpu_ms !== null) events.push(["run ended", row.queue_ms + row.gpu_ms, row.worker_id ? `by ${row.worker_id}` : ""]);
    if (row.completed_at !== null) events.push([row.status, row.latency_ms ?? Date.parse(row.completed_at) - start, row.error_code ?? ""]);
    return Parts.cards("Timeline", ["Event", "Time", "After", "Details"], events.map(([event, after, text]) => [event, Parts.when(new Date(start + after)), time(after), text]));
  }

  async function one(query) {
    const row = await Api.get(`/requests/${encodeURIComponent(query.id)}`);
    const shown = ["id", "status", "error_code", "customer_id"];
    return { title: "Request", nodes: [
      list([["Id", element("code", row.id)], ["Status", state(row)], ["Error", row.error_code ? element("code", row.error_code) : ""], ["Customer", await customerLink(row.customer_id)]]),
      ...phases(row), ...timeline(row), element("h3", "All fields"),
      list(Object.entries(row).filter(([name, value]) => !shown.includes(name) && value !== null).map(([name, value]) => [name, name.endsWith("_at") ? Parts.when(value) : String(value)])),
      Parts.link("Failed requests with this model", "requests", { status: "failed", ...(row.model ? { model: row.model } : {}) })] };
  }

  return { all, one };
})();
