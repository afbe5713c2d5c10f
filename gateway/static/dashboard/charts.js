// Charts with uPlot: values at the cursor, which all charts share, thresholds, and a line for each event.
// Without uPlot, a sentence says so; the tables have the figures.
"use strict";

const Charts = (() => {
  const SYNC = "tierlane";
  const DAY_MS = 24 * 60 * 60 * 1000;
  const drawn = {};
  let view = { rangeMs: 900000, log: false, events: [] };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tierColour = (at) => colour(`--tier-${Math.min(at, 4)}`);
  const line = (label, stroke, more = {}) => ({ label, stroke, width: 2, points: { show: false }, ...more });
  const compact = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : value >= 100 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 100) / 100));
  const valueText = (unit) => (plot, value) => (value === null || value === undefined ? "–" : `${compact(value)}${unit}`);

  // Lines of events behind the data, with a mark at the top, in the colour of their level.
  function drawEvents(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const [at, level] of view.events) {
      const x = Math.round(plot.valToPos(at / 1000, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(level === "bad" ? "--bad" : level === "good" ? "--good" : "--soft");
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([3 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.fillRect(x - 3 * devicePixelRatio, bbox.top, 6 * devicePixelRatio, 5 * devicePixelRatio);
    }
    ctx.restore();
  }

  function valueScale(unit, canLog) {
    const logarithm = { distr: 100, fwd: (value) => Math.log10(1 + Math.max(0, value)), bwd: (value) => 10 ** value - 1 };
    if (canLog && view.log) return { ...logarithm, range: (plot, low, high) => [0, Math.max(high * 1.3, 1)] };
    return { range: (plot, low, high) => [0, unit === " %" ? 105 : Math.max(high * 1.1, 1)] };
  }

  // 0, 1, 2, 5, 10, 20 ... on the logarithmic axis, fewer where they would overlap.
  function logTicks(plot, axis, low, high) {
    const steps = high > 2000 ? [1] : high > 100 ? [1, 3] : [1, 2, 5];
    const ticks = [0];
    for (let decade = 1; decade <= high; decade *= 10) ticks.push(...steps.map((step) => step * decade).filter((tick) => tick <= high));
    return ticks;
  }

  // Clock times; over several days, one date for each day.
  function timeAxis() {
    return view.rangeMs > DAY_MS ? { values: "{MMM} {D}", incrs: [DAY_MS / 1000] } : { values: "{HH}:{mm}" };
  }

  function options(place, series, unit, canLog) {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    return {
      width: place.clientWidth,
      height: place.clientHeight,
      series: [{ label: "time", value: view.rangeMs > DAY_MS ? "{MMM} {D} {HH}:{mm}" : "{HH}:{mm}:{ss}" }, ...series.map((each) => ({ value: valueText(unit), ...each }))],
      axes: [{ ...axis, size: 32, ...timeAxis() }, { ...axis, ...(canLog && view.log ? { splits: logTicks, filter: (plot, ticks) => ticks } : {}), size: 56, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : compact(tick))) }],
      scales: { x: { range: (plot, low, high) => [high - view.rangeMs / 1000, high] }, y: valueScale(unit, canLog) },
      cursor: { drag: { x: false, y: false }, sync: { key: SYNC, setSeries: false }, points: { size: 6 } },
      legend: { live: true },
      hooks: { drawClear: [drawEvents], setCursor: [showEventsAtCursor] },
    };
  }

  // The legend takes one line or more: the plot gets the rest of the place.
  function fit(plot, place) {
    const legend = plot.root.querySelector(".u-legend")?.offsetHeight;
    const height = Math.max(80, place.clientHeight - legend);
    if (legend && plot.height !== height) plot.setSize({ width: place.clientWidth, height });
  }

  // The events near the cursor, as text. The cursor of one chart moves those of all, so one line is enough.
  function showEventsAtCursor(plot) {
    const place = document.getElementById("cursor-events");
    if (plot.cursor.left === undefined || plot.cursor.left < 0) {
      place.replaceChildren();
      return;
    }
    const at = plot.posToVal(plot.cursor.left, "x") * 1000;
    const near = view.events.filter(([when]) => Math.abs(when - at) < view.rangeMs / 150).slice(-3);
    place.replaceChildren(...near.map(Events.line));
  }

  // A chart is made again if its series, its axis or the colours changed, else it gets the new data.
  function draw(id, shape, series, data, unit = "", canLog = true) {
    const place = document.getElementById(id);
    const known = drawn[id];
    const key = `${shape}|${canLog && view.log}|${place.clientWidth}x${place.clientHeight}|${series.map((each) => each.label).join()}`;
    if (!known || known.key !== key) {
      if (known) known.plot.destroy();
      drawn[id] = { key, plot: new uPlot(options(place, series, unit, canLog), data, place) };
    } else {
      known.plot.setData(data);
    }
    const { plot } = drawn[id];
    // uPlot lays its legend out in a microtask, without values if the chart is new or its size changes; its height depends on them.
    const showLatest = () => (plot.cursor.left === undefined || plot.cursor.left < 0) && plot.setLegend({ idx: data[0].length - 1 });
    showLatest();
    requestAnimationFrame(() => {
      showLatest();
      fit(plot, place);
      queueMicrotask(showLatest);
    });
  }

  const times = (points) => points.map((point) => point.at / 1000);
  const total = (points, field) => points.map((point) => Object.values(point.tiers).reduce((sum, tier) => sum + (tier[field] ?? 0), 0));
  const constant = (points, value) => points.map(() => value);
  const ofTier = (points, name, field, scale = 1) =>
    points.map((point) => {
      const value = point.tiers[name]?.[field];
      return value === undefined || value === null ? null : value * scale;
    });

  function load(points, shape) {
    const series = [
      line("in", colour("--arriving")),
      line("out", colour("--good")),
      line("rejected", colour("--bad"), { width: 1.5 }),
      line("demand", colour("--text"), { width: 1, dash: [5, 4] }),
      line("capacity", colour("--text"), { width: 3 }),
    ];
    const data = [times(points), total(points, "in"), total(points, "out"), total(points, "shed"),
      points.map((point) => point.demand), points.map((point) => point.capacity)];
    draw("load", shape, series, data, "/s");
  }

  function byTier(id, points, tiers, shape, field, { scale = 1, unit = "", canLog = true } = {}) {
    const series = tiers.map((tier, at) => line(tier.name, tierColour(at)));
    draw(id, shape, series, [times(points), ...tiers.map((tier) => ofTier(points, tier.name, field, scale))], unit, canLog);
  }

  // With the depth from which a tier is shed as a dotted line, once the queue comes near it.
  function depth(points, tiers, shape) {
    const shown = tiers.map((tier, at) => [tier, at]);
    const near = shown.filter(([tier]) => tier.shed_depth && ofTier(points, tier.name, "depth").some((value) => value > tier.shed_depth / 4));
    const series = [...shown.map(([tier, at]) => line(tier.name, tierColour(at))),
      ...near.map(([tier, at]) => line(`${tier.name} shed from`, tierColour(at), { width: 1, dash: [2, 4] }))];
    const data = [times(points), ...shown.map(([tier]) => ofTier(points, tier.name, "depth")),
      ...near.map(([tier]) => constant(points, tier.shed_depth))];
    draw("depth", shape, series, data);
  }

  // A percentile is the end of a bucket of a histogram.
  const bound = (plot, value) => (value === null || value === undefined ? "–" : `≤ ${compact(value)} ms`);

  function latency(points, tier, shape) {
    const series = [line("p50", colour("--p50"), { dash: [2, 3], value: bound }), line("p95", colour("--p95"), { value: bound }),
      line("p99", colour("--p99"), { dash: [8, 3], value: bound })];
    const data = [times(points), ...["p50", "p95", "p99"].map((field) => ofTier(points, tier.name, field))];
    if (tier.slo_ms) {
      series.push(line("objective", colour("--bad"), { width: 1, dash: [2, 4] }));
      data.push(constant(points, tier.slo_ms));
    }
    draw("latency", `${shape}|${tier.name}`, series, data, " ms");
  }

  const IDS = ["load", "answers", "depth", "latency", "limits", "rejected"];

  // `tiers`: those of the state that is shown. `latencyTier`: the name of one of them.
  function show(points, tiers, latencyTier, next) {
    view = next;
    if (typeof uPlot === "undefined") {
      for (const id of IDS) document.getElementById(id).textContent = "No charts: this gateway was built without uPlot.";
      return;
    }
    if (!points.length || !document.getElementById("load").clientWidth) return;
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const shape = `${dark}|${view.rangeMs}`;
    load(points, shape);
    byTier("answers", points, tiers, shape, "out", { unit: "/s" });
    depth(points, tiers, shape);
    const tier = tiers.find((each) => each.name === latencyTier) ?? tiers[0];
    if (tier) latency(points, tier, shape);
    byTier("limits", points, tiers, shape, "ratio", { scale: 100, unit: " %", canLog: false });
    byTier("rejected", points, tiers, shape, "shed", { unit: "/s" });
  }

  // Moves the cursor of the focused chart, and with it those of all.
  function step(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const plot = drawn[event.currentTarget.id]?.plot;
    if (!direction || !plot) return;
    event.preventDefault();
    const width = plot.over.clientWidth;
    const left = plot.cursor.left >= 0 ? plot.cursor.left : width;
    plot.setCursor({ left: Math.min(width - 1, Math.max(0, left + direction * Math.max(4, width / 60))), top: plot.over.clientHeight / 2 }, true, true);
  }

  for (const id of IDS) document.getElementById(id)?.addEventListener("keydown", step);

  return { show, colour, compact, fit };
})();
