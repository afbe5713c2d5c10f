// Usage by day, for the pages of customers and admins: the days of UTC, costs, and a chart with bars of each day.
"use strict";

const Daily = (() => {
  const DAY_MS = 86400000;
  const RANGES = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
  const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);
  const cost = (value) => (value === null ? "no price" : value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 }));

  // The last days until today, such as 2026-11-30.
  function last(count) {
    const now = Date.now();
    return Array.from({ length: count }, (_, n) => dayOf(now - (count - 1 - n) * DAY_MS));
  }

  // `groups`: of {label, values}, drawn one upon the other. Returns null without a place, or without uPlot.
  function chart(place, days, groups, shown = Charts.compact) {
    if (typeof uPlot === "undefined" || !place.clientWidth) return null;
    const sums = groups.map((_, at) => days.map((_day, n) => groups.slice(0, at + 1).reduce((sum, each) => sum + each.values[n], 0)));
    const series = groups.map(({ label, values }, at) => ({
      label, fill: Charts.colour(`--tier-${at}`), stroke: Charts.colour(`--tier-${at}`), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.7, 40] }), value: (_, __, ___, n) => (n === null ? "–" : shown(values[n])),
    }));
    const axis = { stroke: Charts.colour("--soft"), grid: { stroke: Charts.colour("--line"), width: 1 }, ticks: { stroke: Charts.colour("--line") } };
    const options = {
      width: place.clientWidth, height: place.clientHeight, tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
      series: [{ label: "day", value: "{YYYY}-{MM}-{DD}" }, ...series.reverse()],
      axes: [{ ...axis, size: 32, values: "{MM}-{DD}", incrs: [1, 2, 3, 7, 14, 30].map((n) => n * 86400) },
        { ...axis, size: 56, values: (_, ticks) => ticks.map(Charts.compact) }],
      scales: { x: { range: (_, low, high) => [low - 43200, high + 43200] }, y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
      cursor: { drag: { x: false, y: false } },
    };
    // The highest sum is drawn first, the others before it.
    const plot = new uPlot(options, [days.map((day) => Date.parse(day) / 1000), ...sums.reverse()], place);
    requestAnimationFrame(() => {
      if (!plot.root.isConnected) return;
      Charts.fit(plot, place);
      plot.setLegend({ idx: days.length - 1 });
    });
    return plot;
  }

  return { RANGES, cost, last, chart };
})();
