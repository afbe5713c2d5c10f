// Usage and cost: a chart by day, and tables by day, model and key of the same requests.
"use strict";

const Usage = (() => {
  const { element, table, count } = Format;
  const DAY_MS = 86400000;
  const RANGES = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
  const FIGURES = [["requests", "Requests"], ["tokens", "Tokens"], ["cost_usd", "Cost in USD"], ["gpu_s", "GPU seconds"]];
  const TABLES = [["model", "By model", "Model"], ["key", "By key", "Key"], ["day", "By day", "Day, UTC"]];
  const [days, figure] = [select(RANGES, "30", "Time of the usage"), select(FIGURES, "requests", "Figure of the chart")];
  const [fault, place, tables] = [element("p"), element("div", undefined, "chart"), element("div", undefined, "tables")];
  let byDay = [];
  let all = [];
  let plot = null;

  function select(options, value, label) {
    const node = element("select");
    node.append(...options.map(([name, text]) => Object.assign(element("option", text), { value: name })));
    node.setAttribute("aria-label", label);
    node.value = value;
    return node;
  }

  const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);
  const cost = (value) => (value === null ? "no price" : value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 }));

  function draw() {
    plot?.destroy();
    plot = null;
    if (typeof uPlot === "undefined" || !byDay.length || !place.clientWidth) return;
    const [name, label] = FIGURES.find(([each]) => each === figure.value);
    place.setAttribute("aria-label", `${label} by day; the tables have the figures.`);
    const of = new Map(byDay.map((each) => [each.day, each[name] ?? 0]));
    const [line, text] = [Charts.colour("--line"), Charts.colour("--soft")];
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
    const series = { label, fill: Charts.colour("--tier-0"), stroke: Charts.colour("--tier-0"), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.7, 40] }), value: (_, value) => (value === null ? "–" : name === "cost_usd" ? cost(value) : count(value)) };
    plot = new uPlot({
      width: place.clientWidth, height: place.clientHeight, tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
      series: [{ label: "day", value: "{YYYY}-{MM}-{DD}" }, series],
      axes: [{ ...axis, size: 32, values: "{MM}-{DD}", incrs: [1, 2, 7, 14, 30].map((each) => each * 86400) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map(Charts.compact) }],
      scales: { x: { range: (_, low, high) => [low - 43200, high + 43200] }, y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
      cursor: { drag: { x: false, y: false } },
    }, [all.map((day) => Date.parse(day) / 1000), all.map((day) => of.get(day) ?? 0)], place);
    const drawn = plot;
    requestAnimationFrame(() => {
      if (plot !== drawn) return;
      Charts.fit(plot, place);
      plot.setLegend({ idx: all.length - 1 });
    });
  }

  async function load() {
    const length = Number(days.value);
    const now = Date.now();
    const wanted = Array.from({ length }, (_, at) => dayOf(now - (length - 1 - at) * DAY_MS));
    const query = `from=${wanted[0]}&to=${wanted.at(-1)}`;
    try {
      const pages = [];
      for (const [by] of TABLES) pages.push(await Session.read(`/v1/usage?by=${by}&${query}`)); // A gateway runs few such queries at a time.
      [all, byDay] = [wanted, pages[2].data];
      place.hidden = !byDay.length;
      fault.textContent = byDay.length ? "Accepted requests, in days of UTC." : "No accepted requests in this time.";
      fault.className = "soft";
      tables.replaceChildren(...(byDay.length ? TABLES : []).map(([by, caption, heading], at) => {
        const part = element("div");
        const rows = by === "day" ? pages[at].data.toReversed() : pages[at].data.toSorted((a, b) => b.requests - a.requests);
        part.append(...table(pages[at].has_more ? `${caption}, the first ${rows.length}` : caption, [heading, "Requests", "Tokens", "GPU s", "USD"],
          rows.map((each) => [each[by === "key" ? "key_id" : by], count(each.requests), count(each.tokens), count(each.gpu_s), cost(each.cost_usd)])));
        return part;
      }));
      draw();
    } catch (error) {
      if (!Session.isOpen()) return;
      fault.textContent = error.message;
      fault.className = "bad";
    }
  }

  function show(section) {
    const line = element("p", undefined, "actions");
    line.append(days, figure);
    section.replaceChildren(line, fault, place, tables);
    load();
  }

  function clear() {
    byDay = [];
    draw();
    place.hidden = true;
    tables.replaceChildren();
  }

  place.hidden = true;
  place.setAttribute("role", "img");
  days.addEventListener("change", load);
  figure.addEventListener("change", draw);
  new ResizeObserver(draw).observe(document.getElementById("usage-section"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  return { show, load, clear };
})();
