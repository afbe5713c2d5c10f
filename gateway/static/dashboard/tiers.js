// The table of tiers.
"use strict";

const Tiers = (() => {
  const GOOD = 0.999;
  const FAIR = 0.95;
  const { element, count, percent, time, shedShare } = Format;

  function sparkline(points, name, at) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const [first, last] = [points[0]?.at ?? 0, points[points.length - 1]?.at ?? 1];
    const values = points.map((point) => [point.at, point.tiers[name]?.out ?? 0]);
    const most = Math.max(1, ...values.map(([, value]) => value));
    line.setAttribute("points", values.map(([when, value]) =>
      `${((when - first) / Math.max(1, last - first) * 100).toFixed(1)},${(23 - (value / most) * 22).toFixed(1)}`).join(" "));
    line.setAttribute("class", `tier-${Math.min(at, 4)}`);
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  // Never rounded up to 100 %.
  function successCell(points, name) {
    const share = Past.successRate(points, name);
    if (share === null) return ["–", "soft"];
    return [`${(Math.floor(share * 10000) / 100).toFixed(2)} %`, share >= GOOD ? "" : share >= FAIR ? "warn" : "bad"];
  }

  // A percentile is the end of a bucket of a histogram: at most that. A tier without requests has no response times; a tier with requests and without response times has a fault.
  function percentile(tier, value) {
    if (value !== null) return [`≤ ${time(value)}`, tier.slo_ms && value > tier.slo_ms ? "warn" : ""];
    return tier.in_rps > 0 ? ["no data", "bad"] : ["–", "soft"];
  }

  function row(tier, at, points) {
    const line = element("tr");
    const shed = shedShare(tier);
    const name = element("th", tier.name, `tier-${Math.min(at, 4)}`);
    name.scope = "row";
    const cells = [
      [tier.background_depth ? `${count(tier.depth)} + ${count(tier.background_depth)} jobs` : count(tier.depth), ""],
      [time(tier.oldest_ms), tier.oldest_ms > 1000 ? "warn" : ""],
      [count(tier.in_rps), ""],
      [count(tier.out_rps), ""],
      [percent(shed), shed > 0.02 ? "warn" : "soft"],
      successCell(points, tier.name),
      [percent(tier.limit_ratio), tier.limit_ratio < 0.995 ? "warn" : ""],
      percentile(tier, tier.p50_ms), percentile(tier, tier.p95_ms), percentile(tier, tier.p99_ms),
      [tier.fairness.toFixed(2), tier.fairness < 0.9 ? "warn" : "soft"],
      [`${percent(tier.share)} / ${percent(tier.guaranteed_share)}`, ""],
    ];
    line.append(name, ...cells.map(([text, className]) => element("td", text, className)));
    const last = element("td");
    last.append(sparkline(points, tier.name, at));
    line.append(last);
    return line;
  }

  function show(figures, points) {
    document.querySelector("#tiers tbody").replaceChildren(...figures.tiers.map((tier, at) => row(tier, at, points)));
  }

  return { show };
})();
