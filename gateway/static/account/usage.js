// Usage and cost: a chart by day, and tables by day, model and key of the same requests.
"use strict";

const Usage = (() => {
  const { element, table, count } = Format;
  const { cost } = Daily;
  const FIGURES = [["requests", "Requests"], ["tokens", "Tokens"], ["cost_usd", "Cost in USD"], ["gpu_s", "GPU seconds"]];
  const TABLES = [["model", "By model", "Model"], ["key", "By key", "Key"], ["day", "By day", "Day, UTC"]];
  const [days, figure] = [select(Daily.RANGES, "30", "Time of the usage"), select(FIGURES, "requests", "Figure of the chart")];
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

  function draw() {
    plot?.destroy();
    plot = null;
    if (!byDay.length) return;
    const [name, label] = FIGURES.find(([each]) => each === figure.value);
    place.setAttribute("aria-label", `${label} by day; the tables have the figures.`);
    const of = new Map(byDay.map((each) => [each.day, each[name] ?? 0]));
    plot = Daily.chart(place, all, [{ label, values: all.map((day) => of.get(day) ?? 0) }], name === "cost_usd" ? cost : count);
  }

  async function load() {
    const wanted = Daily.last(Number(days.value));
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
