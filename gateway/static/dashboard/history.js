// The points and events of the last 60 minutes: those that the gateway sent at first, and one for each state since.
"use strict";

const PastHour = (() => {
  const KEEP_MS = 60 * 60 * 1000;
  const MAX_EVENTS = 500;
  const MAX_GAP_MS = 30000;
  let points = [];
  let events = [];

  function tierPoint(tier) {
    return { depth: tier.depth, in: tier.in_rps, out: tier.out_rps, shed: tier.shed_rps, failed: tier.failed_rps, ratio: tier.limit_ratio,
      p50: tier.p50_ms, p95: tier.p95_ms, p99: tier.p99_ms };
  }

  function load(rows) {
    points = rows.map(([at, , demand, capacity, tiers]) => ({
      at, demand, capacity,
      tiers: Object.fromEntries(tiers.map(([name, depth, , into, out, shed, ratio, p50, p95, p99, failed]) =>
        [name, { depth, in: into, out, shed, failed, ratio, p50, p95, p99 }])),
    }));
    events = rows.flatMap((row) => row[5]).slice(-MAX_EVENTS);
  }

  // `figures`: of all pools, or of the pool that is shown.
  function add(state, figures) {
    if (!points.length || state.at_ms > points[points.length - 1].at) {
      const tiers = Object.fromEntries(figures.tiers.map((tier) => [tier.name, tierPoint(tier)]));
      points.push({ at: state.at_ms, demand: figures.demand_rps, capacity: figures.capacity_rps, tiers });
    }
    while (points.length && points[0].at < state.at_ms - KEEP_MS) points.shift();
    if (state.events.length) events = [...events, ...state.events].slice(-MAX_EVENTS);
  }

  const within = (rangeMs) => {
    const from = (points.length ? points[points.length - 1].at : 0) - rangeMs;
    return points.filter((point) => point.at >= from);
  };

  // Of the range and the pool; those without a pool concern all pools.
  const eventsWithin = (rangeMs, pool) => {
    const from = (points.length ? points[points.length - 1].at : Date.now()) - rangeMs;
    return events.filter(([at, , , , of]) => at >= from && (!pool || !of || of === pool));
  };

  // The share of requests of a tier that were answered, of those that were answered or failed by our fault; null without any.
  function successRate(shown, name) {
    let out = 0;
    let failed = 0;
    shown.forEach((point, at) => {
      const span = at ? Math.min(MAX_GAP_MS, point.at - shown[at - 1].at) : 1000;
      out += (point.tiers[name]?.out ?? 0) * span;
      failed += (point.tiers[name]?.failed ?? 0) * span;
    });
    return out + failed > 0 ? out / (out + failed) : null;
  }

  return { load, add, within, eventsWithin, successRate };
})();
