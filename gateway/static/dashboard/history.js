// The points and events of the last 60 minutes: those that the gateway sent at first, and one for each state since. For ranges of
// days, the points of five minutes that the gateway keeps.
"use strict";

const Past = (() => {
  const KEEP_MS = 60 * 60 * 1000;
  const DAYS_STEP_MS = 5 * 60 * 1000;
  const MAX_EVENTS = 500;
  const MAX_GAP_MS = 30000;
  let points = [];
  let events = [];
  let days = [];
  let dayEvents = [];

  function tierPoint(tier) {
    return { depth: tier.depth, in: tier.in_rps, out: tier.out_rps, shed: tier.shed_rps, failed: tier.failed_rps, ratio: tier.limit_ratio,
      p50: tier.p50_ms, p95: tier.p95_ms, p99: tier.p99_ms };
  }

  function pointsOf(rows, stepMs) {
    return rows.map(([at, , demand, capacity, tiers]) => ({
      at, demand, capacity, stepMs,
      tiers: Object.fromEntries(tiers.map(([name, depth, , into, out, shed, ratio, p50, p95, p99, failed]) =>
        [name, { depth, in: into, out, shed, failed, ratio, p50, p95, p99 }])),
    }));
  }

  const eventsOf = (rows) => rows.flatMap((row) => row[5]).slice(-MAX_EVENTS);

  function load(rows) {
    points = pointsOf(rows);
    events = eventsOf(rows);
  }

  function loadDays(rows) {
    days = pointsOf(rows, DAYS_STEP_MS);
    dayEvents = eventsOf(rows);
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

  // Days end with the points of the hour that are not in them yet.
  const within = (rangeMs) => {
    const from = (points.length ? points[points.length - 1].at : 0) - rangeMs;
    if (rangeMs <= KEEP_MS) return points.filter((point) => point.at >= from);
    const last = days[days.length - 1]?.at ?? 0;
    return [...days, ...points.filter((point) => point.at > last)].filter((point) => point.at >= from);
  };

  // Of the range and the pool; those without a pool concern all pools.
  const eventsWithin = (rangeMs, pool) => {
    const from = (points.length ? points[points.length - 1].at : Date.now()) - rangeMs;
    const last = dayEvents[dayEvents.length - 1]?.[0] ?? 0;
    const known = rangeMs <= KEEP_MS ? events : [...dayEvents, ...events.filter(([at]) => at > last)];
    return known.filter(([at, , , , of]) => at >= from && (!pool || !of || of === pool));
  };

  // The share of requests of a tier that were answered, of those that were answered or failed by our fault; null without any.
  function successRate(shown, name) {
    let out = 0;
    let failed = 0;
    shown.forEach((point, at) => {
      const span = at ? Math.min(point.stepMs ?? MAX_GAP_MS, point.at - shown[at - 1].at) : point.stepMs ?? 1000;
      out += (point.tiers[name]?.out ?? 0) * span;
      failed += (point.tiers[name]?.failed ?? 0) * span;
    });
    return out + failed > 0 ? out / (out + failed) : null;
  }

  return { load, loadDays, add, within, eventsWithin, successRate };
})();
