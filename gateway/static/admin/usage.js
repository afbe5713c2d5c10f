// Usage and cost of a customer by day, model and key: a chart and tables of the same figures.
"use strict";

const Usage = (() => {
  const { element, table, count } = Format;
  const DAY_MS = 86400000;
  const MOST_SERIES = 4;
  const RANGES = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
  const FIGURES = [["cost_usd", "Cost in USD"], ["requests", "Requests"], ["tokens", "Tokens"], ["gpu_s", "GPU seconds"]];
  let chosen = { days: "30", figure: "requests" };
  let plot = null;

  const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);
  const cost = (value) => (value === null ? "no price" : value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 }));

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
    if (typeof uPlot === "undefined" || !place.clientWidth) return;
    const most = [...sums(lines, "model")].sort(([, a], [, b]) => (b[figure] ?? 0) - (a[figure] ?? 0)).map(([name]) => name);
    const named = most.length > MOST_SERIES + 1 ? most.slice(0, MOST_SERIES) : most;
    const groups = named.length < most.length ? [...named, "others"] : named;
    const own = groups.map((group) => {
      const byDay = sums(lines.filter((each) => (named.includes(each.model) ? each.model : "others") === group), "day");
      return days.map((day) => byDay.get(day)?.[figure] ?? 0);
    });
    const sumsUpTo = own.map((_, at) => days.map((_day, n) => own.slice(0, at + 1).reduce((sum, each) => sum + each[n], 0)));
    const series = groups.map((label, at) => ({
      label: label ?? "no model", fill: Charts.colour(`--tier-${at}`), stroke: Charts.colour(`--tier-${at}`), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.7, 40] }), value: (_, __, ___, n) => (n === null ? "–" : Charts.compact(own[at][n])),
    }));
    const axis = { stroke: Charts.colour("--soft"), grid: { stroke: Charts.colour("--line"), width: 1 }, ticks: { stroke: Charts.colour("--line") } };
    const options = {
      width: place.clientWidth, height: place.clientHeight, tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
      series: [{ label: "day", value: "{YYYY}-{MM}-{DD}" }, ...series.reverse()],
      axes: [{ ...axis, size: 32, values: "{MM}-{DD}", incrs: [1, 2, 3, 7, 14, 30].map((n) => n * 86400) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map(Charts.compact) }],
      scales: { x: { range: (_, low, high) => [low - 43200, high + 43200] }, y: { range: (_, __, high) => [0, Math.max(high * 1.1, 1)] } },
      cursor: { drag: { x: false, y: false } },
      legend: { live: true },
    };
    // The highest sum is drawn first, the others before it.
    plot = new uPlot(options, [days.map((day) => Date.parse(day) / 1000), ...sumsUpTo.reverse()], place);
    requestAnimationFrame(() => {
      if (!plot) return;
      Charts.fit(plot, place);
      plot.setLegend({ idx: days.length - 1 });
    });
  }

  // The section of a customer; `customer`: its id.
  function section(customer) {
    const node = element("div");
    const line = element("p", undefined, "actions");
    const days = Parts.select(RANGES, chosen.days, "Time of the usage");
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
      const now = Date.now();
      all = Array.from({ length: Number(days.value) }, (_, n) => dayOf(now - (Number(days.value) - 1 - n) * DAY_MS));
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
