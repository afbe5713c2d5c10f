// Worker tiles. The figures are rewritten each second; the button and the link stay, so that neither a click nor the focus is lost.
"use strict";

const Workers = (() => {
  const MOST = 200;
  const MOST_CAUSES = 5;
  const { element, sentence, count, percent, time, viewLink, replace } = Format;
  const order = new Intl.Collator("en", { numeric: true });
  const tiles = new Map();
  let state = null;
  let shared = [];

  const place = () => document.getElementById("workers");
  const key = (worker) => `${worker.pool} ${worker.id}`;
  const gpus = (number) => (number === 1 ? "1 healthy GPU" : `${count(number)} healthy GPUs`);

  // --- what an action means -------------------------------------------------------------------------------------------

  function others(worker) {
    return state.workers.filter((each) => each.pool === worker.pool && each.healthy && each.id !== worker.id).length;
  }

  function impact(worker) {
    const left = others(worker);
    const capacity = Math.max(0, state.capacity_rps - worker.capacity_rps);
    const lines = [];
    if (worker.healthy) {
      lines.push([`${left} of ${gpus(left + 1)} would remain in pool ${worker.pool}: capacity ${count(state.capacity_rps)}/s → ` +
        `${count(capacity)}/s under demand ${count(state.demand_rps)}/s.`, ""]);
      if (!left) lines.push([`Pool ${worker.pool} would have no healthy GPU.`, "bad"]);
      else if (capacity < state.demand_rps) lines.push(["That is less than the demand: lower tiers are shed first.", "warn"]);
      lines.push([`It finishes its batches (${worker.in_flight} in flight), and claims no more batches until it is uncordoned.`, "soft"]);
    } else {
      lines.push([`It is not serving. ${gpus(left)} in pool ${worker.pool}; it stays without work after it returns.`, ""]);
    }
    if (state.redis_problem !== null) lines.push(["Redis is not responding: these figures are old.", "bad"]);
    return lines;
  }

  function confirmCordon(worker) {
    const body = { worker: worker.id, healthy_left: others(worker) };
    Dialog.open({
      title: `Cordon ${worker.id}?`,
      lines: impact(worker),
      verb: `Cordon ${worker.id}`,
      reason: true,
      act: async (reason) => {
        const result = await Dialog.post("/workers/cordon", { ...body, reason });
        return result.changed ? `${worker.id} is cordoned.` : `${worker.id} was cordoned already.`;
      },
    });
  }

  function confirmUncordon(worker) {
    Dialog.open({
      title: `Uncordon ${worker.id}?`,
      lines: [[`It may claim work again. Pool ${worker.pool} has ${gpus(others(worker))} beside it.`, ""]],
      verb: `Uncordon ${worker.id}`,
      act: async () => {
        const result = await Dialog.post("/workers/uncordon", { worker: worker.id });
        return result.changed ? `${worker.id} is uncordoned.` : `${worker.id} was not cordoned.`;
      },
    });
  }

  // --- tiles ----------------------------------------------------------------------------------------------------------

  function status(worker) {
    if (!worker.healthy && (worker.status === "ready" || worker.status === "busy")) return ["lost", "bad"];
    if (worker.cordoned && worker.status !== "cordoned") return [`${worker.status}, being cordoned`, "warn"];
    if (worker.status === "cordoned") return [worker.in_flight ? "cordoned, finishing" : "cordoned", "warn"];
    return [worker.status, worker.healthy ? "good" : "bad"];
  }

  const running = (worker) => (worker.slots ? `${worker.in_flight} of ${worker.slots} slots` : `${worker.in_flight} in flight`);

  // `brief`: without what the list of causes has.
  function facts(worker, brief = false) {
    const lines = [element("p", ...status(worker))];
    const busy = element("progress");
    busy.max = 1;
    busy.setAttribute("aria-label", `${worker.id} busy`);
    busy.value = worker.healthy ? worker.utilization : 0;
    const rate = worker.rps ? ` · can do ${count(worker.rps)}/s` : "";
    const ageMs = worker.age_ms + (state.look_age_s ?? 0) * 1000;
    if (worker.healthy) lines.push(busy, element("p", `${percent(worker.utilization)} busy · ${running(worker)}${rate}`));
    const listed = brief && !worker.healthy && shared.some((each) => each.fault === worker.reason);
    if (worker.reason && !listed) lines.push(sentence("p", worker.reason, worker.healthy ? "warn" : "bad"));
    if (worker.cordon) lines.push(sentence("p", `cordoned ${worker.cordon}`, "warn"));
    if (worker.slots_source) lines.push(sentence("p", `slots: ${worker.slots_source}`, "soft"));
    lines.push(element("p", `heartbeat ${time(ageMs)} ago`, ageMs > 1500 ? "bad" : "soft"));
    const gpu = worker.gpu;
    if (gpu) {
      lines.push(element("p", `GPU ${percent(gpu.utilization)} · ${gpu.memory_used_mb}/${gpu.memory_total_mb} MiB · ${gpu.temperature_c} °C`));
      if (gpu.fault) lines.push(sentence("p", gpu.fault, "bad"));
      else if (gpu.note) lines.push(sentence("p", gpu.note));
    }
    lines.push(element("p", [worker.pool, worker.backend, worker.version].filter(Boolean).join(" · "), "soft"));
    return lines;
  }

  // The causes that several workers share, the most frequent first.
  function causes(workers) {
    const groups = new Map();
    for (const worker of workers.filter((each) => !each.healthy)) {
      const [label, level] = status(worker);
      const fault = worker.gpu?.fault || worker.reason;
      const text = fault ? `${label}: ${fault}` : label;
      const number = (groups.get(text)?.number ?? 0) + 1;
      groups.set(text, { text, fault, level, number });
    }
    return [...groups.values()].filter((each) => each.number > 1).sort((a, b) => b.number - a.number).slice(0, MOST_CAUSES);
  }

  function made(worker) {
    const tile = element("div");
    const body = element("div");
    const button = element("button");
    tile.dataset.worker = worker.id;
    button.type = "button";
    button.addEventListener("click", () => {
      const now = state.workers.find((each) => key(each) === key(worker));
      if (now) (now.cordoned ? confirmUncordon : confirmCordon)(now);
    });
    tile.append(viewLink("worker", worker.id, "name"), body, button);
    return { tile, body, button };
  }

  function shown(worker) {
    if (!tiles.has(key(worker))) tiles.set(key(worker), made(worker));
    const { tile, body, button } = tiles.get(key(worker));
    const intended = worker.cordoned || worker.status === "cordoned";
    tile.className = worker.healthy ? "worker" : intended ? "worker ill cordoned" : "worker ill";
    body.replaceChildren(...facts(worker, true));
    const verb = worker.cordoned ? "Uncordon" : "Cordon";
    if (button.textContent !== verb) {
      button.textContent = verb;
      button.setAttribute("aria-label", `${verb} ${worker.id}`);
    }
    return tile;
  }

  function forget() {
    const known = new Set(state.workers.map(key));
    for (const each of tiles.keys()) if (!known.has(each)) tiles.delete(each);
  }

  // `pool`: "" shows all.
  function show(document_, pool) {
    state = document_;
    forget();
    const ordered = state.workers.filter((each) => !pool || each.pool === pool)
      .sort((a, b) => a.healthy - b.healthy || order.compare(a.id, b.id));
    shared = causes(ordered);
    replace(document.getElementById("causes"), shared.map((each) => sentence("li", `${count(each.number)} workers: ${each.text}`, each.level)));
    const nodes = ordered.slice(0, MOST).map(shown);
    if (!nodes.length) nodes.push(sentence("p", "No workers. Start one with `tierlane worker`, or check that workers reach Redis.", "bad"));
    if (ordered.length > MOST) nodes.push(element("p", `and ${ordered.length - MOST} more`));
    const now = [...place().children];
    if (now.length === nodes.length && now.every((node, at) => node === nodes[at])) return;
    const held = place().contains(document.activeElement) ? document.activeElement : null;
    place().replaceChildren(...nodes);
    if (held && held.isConnected) held.focus();
  }

  return { show, facts };
})();
