// How much of a tier's calls was answered in time: what was not, and by our fault, eats up what its objective allows.
"use strict";

const Promises = (() => {
  const GOOD = 0.999;
  const FAIR = 0.95;

  // Of all points, which span 15 minutes; null where nobody asked.
  function kept(points, name) {
    let out = 0;
    let failed = 0;
    for (const point of points) {
      out += point.tiers[name]?.out ?? 0;
      failed += point.tiers[name]?.failed ?? 0;
    }
    return out + failed > 0 ? out / (out + failed) : null;
  }

  // Never rounded up to all of them.
  const words = (share) => `${(Math.floor(share * 10000) / 100).toFixed(2)} %`;

  function cell(points, name) {
    const share = kept(points, name);
    if (share === null) return ["–", "soft"];
    return [words(share), share >= GOOD ? "" : share >= FAIR ? "warn" : "bad"];
  }

  return { cell };
})();
