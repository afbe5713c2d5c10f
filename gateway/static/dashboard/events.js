// The list of events, the newest first.
"use strict";

const Events = (() => {
  const MOST = 200;
  const { element, sentence, clock, replace } = Format;
  const LABELS = { status: "status", redis: "Redis", limits: "limits", dead_letters: "dead letters", loss: "loss", restart: "restart",
    worker: "worker", cordon: "cordon", config: "config", gateway: "gateway" };

  function line([at, level, text, kind]) {
    const shown = element("li");
    shown.append(element("time", clock(at)), element("span", LABELS[kind] ?? "event", `kind ${level}`), sentence("span", text, level === "news" ? "" : level));
    return shown;
  }

  function show(events) {
    const latest = [...events].sort((a, b) => b[0] - a[0]).slice(0, MOST);
    replace(document.getElementById("events"), latest.length ? latest.map(line) : [element("li", "No events in this range.", "soft")]);
  }

  return { show, line };
})();
