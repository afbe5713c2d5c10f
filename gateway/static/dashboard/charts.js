// Draws the last quarter of an hour with uPlot. Where uPlot is not there, says so and leaves the figures to the tables.
"use strict";

const Charts = (() => {
  const HEIGHT = 170;
  const SPAN_S = 15 * 60;
  const drawn = {};

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tierColour = (at) => colour(`--tier-${Math.min(at, 4)}`);
  const veiled = (hex) => `${hex}55`;

  function options(width, series, unit, bands = []) {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    return {
      width,
      height: HEIGHT,
      series: [{ value: "{HH}:{mm}:{ss}" }, ...series],
      bands,
      axes: [{ ...axis, values: "{HH}:{mm}" }, { ...axis, size: 56 }],
      scales: {
        x: { range: (plot, low, high) => [high - SPAN_S, high] },
        y: { range: (plot, low, high) => [0, unit === "%" ? 105 : Math.max(high * 1.1, 1)] },
      },
      cursor: { drag: { x: false, y: false } },
      legend: { live: false },
    };
  }

  // One chart: made again where its series or the colours changed, else given the new data.
  function draw(id, shape, series, data, unit, bands) {
    const place = document.getElementById(id);
    const known = drawn[id];
    if (known && known.shape === shape) {
      known.plot.setData(data);
      return;
    }
    if (known) known.plot.destroy();
    drawn[id] = { shape, plot: new uPlot(options(place.clientWidth, series, unit, bands), data, place) };
  }

  const times = (points) => points.map((point) => point.at / 1000);
  const ofTier = (points, name, field, scale = 1) =>
    points.map((point) => {
      const value = point.tiers[name]?.[field];
      return value === undefined || value === null ? null : value * scale;
    });

  function stacked(points, names) {
    const sums = points.map(() => 0);
    const rows = names.map((name) => points.map((point, at) => (sums[at] += point.tiers[name]?.out ?? 0)));
    const shed = points.map((point, at) => sums[at] + names.reduce((sum, name) => sum + (point.tiers[name]?.shed ?? 0), 0));
    return { rows, shed };
  }

  // Each fills down to the one under it.
  function flow(points, names, shape) {
    const { rows, shed } = stacked(points, names);
    const bad = colour("--bad");
    const series = [{ label: "shed", stroke: bad, fill: veiled(bad), width: 1, points: { show: false } }];
    const data = [times(points), shed];
    for (let at = names.length - 1; at >= 0; at -= 1) {
      series.push({ label: names[at], stroke: tierColour(at), fill: veiled(tierColour(at)), width: 1, points: { show: false } });
      data.push(rows[at]);
    }
    series.push({ label: "demand", stroke: colour("--text"), width: 1, dash: [5, 4], points: { show: false } });
    series.push({ label: "capacity", stroke: colour("--good"), width: 2, points: { show: false } });
    data.push(points.map((point) => point.demand), points.map((point) => point.capacity));
    const bands = names.map((name, at) => ({ series: [at + 1, at + 2] }));
    draw("flow", shape, series, data, "", bands);
  }

  function byTier(id, points, names, shape, field, scale, unit) {
    const series = names.map((name, at) => ({ label: name, stroke: tierColour(at), width: 2, points: { show: false } }));
    draw(id, shape, series, [times(points), ...names.map((name) => ofTier(points, name, field, scale))], unit);
  }

  function latency(points, tier, shape) {
    const lines = [["p50", "--good"], ["p95", "--warn"], ["p99", "--bad"]];
    const series = lines.map(([label, name]) => ({ label, stroke: colour(name), width: 2, points: { show: false } }));
    draw("latency", `${shape}|${tier}`, series, [times(points), ...lines.map(([field]) => ofTier(points, tier, field))]);
  }

  function show(points, names, latencyTier) {
    if (typeof uPlot === "undefined") {
      for (const id of ["flow", "depth", "latency", "limits"]) {
        document.getElementById(id).textContent = "Charts are not there: this gateway was built without uPlot.";
      }
      return;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const shape = `${dark}|${names.join()}|${document.getElementById("flow").clientWidth}`;
    flow(points, names, shape);
    byTier("depth", points, names, shape, "depth", 1);
    latency(points, latencyTier, shape);
    byTier("limits", points, names, shape, "ratio", 100, "%");
  }

  return { show };
})();
