// Figures in words, and elements that hold text alone: what a worker or a customer is called is never taken for markup.
"use strict";

const Words = (() => {
  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  const count = (value) => (value >= 100 ? Math.round(value) : Math.round(value * 10) / 10).toLocaleString("en");
  const percent = (value) => `${Math.round(value * 100)} %`;
  const time = (ms) => (ms >= 10000 ? `${Math.round(ms / 1000)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`);
  const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
  const shedShare = (tier) => (tier.shed_rps > 0 ? Math.min(1, tier.shed_rps / Math.max(tier.in_rps, tier.shed_rps)) : 0);

  return { element, count, percent, time, clock, shedShare };
})();
