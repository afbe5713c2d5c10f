// Usage and cost of a customer by day, model and key: a chart and tables of the same figures.
"use strict";

const Usage = (() => {
  const { element, table, count } = Format;
  const { cost } = Daily;
  const MOST_SERIES = 4;
  const FIGURES = [["cost_usd", "Cost in USD"], ["requests", "Requests"], ["tokens", "Tokens"], ["gpu_s", "GPU seconds"]];
  let chosen = { days: "30", figure: "requests" };
  let plot = null;

  // Sums of lines by the value of a field. The cost is null without any price.
  function sums(lines, field) {
    const found = new Map();
    for (const each of lines) {
      const sum = found.get(each[field]) ?? { requests: 0, tokens: 0, gpu_s: 0, cost_usd: null };
      for (const name of ["requests", "tokens", "gpu_s"]) sum[name] += each[name];
      if (each.cost_usd !== null) sum.cost_usd = (sum.cost_usd ?? 0) + each.cost_usd;
      found.set(each[field], sum);
    }
    return found;
  }

  function sumTable(caption, heading, lines, field) {
    const found = [...sums(lines, field)].sort(([a], [b]) => (field === "day" ? b.localeCompare(a) : 0));
    return table(caption, [heading, "Requests", "Tokens", "GPU s", "Cost, USD"], found.map(([name, sum]) =>
      [name ?? "–", count(sum.requests), count(sum.tokens), sum.gpu_s.toFixed(1), cost(sum.cost_usd)]));
  }

  // Bars of each day, one model upon the other: the models with the most, and the others together.
  function draw(place, lines, days, figure) {
    plot?.destroy();
    plot = null;
    const most = [...sums(lines, "model")].sort(([, a], [, b]) => (b[figure] ?? 0) - (a[figure] ?? 0)).map(([name]) => name);
    const named = most.length > MOST_SERIES + 1 ? most.slice(0, MOST_SERIES) : most;
    const groups = named.length < most.length ? [...named, "others"] : named;
    const parts = groups.map((group) => {
      const byDay = sums(lines.filter((each) => (named.includes(each.model) ? each.model : "others") === group), "day");
      return { label: group ?? "no model", values: days.map((day) => byDay.get(day)?.[figure] ?? 0) };
    });
    plot = Daily.chart(place, days, parts);
  }

  // The section of a customer; `customer`: its id.
  function section(customer) {
    const node = element("div");
    const line = element("p", undefined, "actions");
    const days = Parts.select(Daily.RANGES, chosen.days, "Time of the usage");
    const figure = Parts.select(FIGURES, chosen.figure, "Figure of the chart");
    const place = element("div", undefined, "chart");
    const tables = element("div");
    const fault = element("p", "Loading …", "soft");
    let lines = [];
    let all = [];
    place.setAttribute("role", "img");
    line.append(days, figure);
    node.append(element("h3", "Usage and cost"), line, fault, place, tables);

    function redraw() {
      chosen = { days: days.value, figure: figure.value };
      place.setAttribute("aria-label", `${figure.selectedOptions[0].text} by day and model; the tables have the figures.`);
      if (place.isConnected) draw(place, lines, all, figure.value);
    }

    async function load() {
      all = Daily.last(Number(days.value));
      try {
        lines = await Api.all("/usage", { customer, from: all[0], to: all.at(-1) });
        fault.textContent = lines.length ? "By the audit, in days of UTC." : "No accepted requests in this time.";
        fault.className = "soft";
      } catch (error) {
        lines = [];
        fault.textContent = error.message;
        fault.className = "bad";
      }
      place.hidden = !lines.length;
      const byDay = element("details");
      byDay.append(element("summary", "Table by day"), ...sumTable("By day", "Day, UTC", lines, "day"));
      tables.replaceChildren(...(lines.length ? [...sumTable("By model", "Model", lines, "model"), ...sumTable("By key", "Key", lines, "key_id"), byDay] : []));
      redraw();
    }

    days.addEventListener("change", load);
    figure.addEventListener("change", redraw);
    new ResizeObserver(redraw).observe(node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    load();
    return [node];
  }

  return { section };
})();
