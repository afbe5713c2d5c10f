// Dead letters, as PostgreSQL counts them; actions apply to exactly those that are shown.
"use strict";

const DeadLetters = (() => {
  const EVERY_MS = 15000;
  const MOST = 10000;
  const { element, count, clock, codeLink, viewLink } = Format;
  const by = (id) => document.getElementById(id);
  let readAt = -Infinity;
  let counted = null;
  let reading = false;
  let again = false;
  let drawn = "";

  const letters = (number) => (number === 1 ? "1 dead letter" : `${count(number)} dead letters`);
  const named = (text) => text || "unknown";
  const day = (ms) => (Date.now() - ms > 86400000 ? new Date(ms).toLocaleDateString("en-CA") : clock(ms));

  // --- actions --------------------------------------------------------------------------------------------------------

  // The selection of an action: a group, or all.
  function selection(found, group) {
    const kind = group ? { tier: group.tier, model: group.model, error_code: group.error_code } : {};
    return { up_to: found.up_to, ...kind };
  }

  const description = (group) => (group ? `of ${named(group.tier)}, ${named(group.model)}, ${group.error_code}` : "of all kinds");

  function confirmPurge(found, group) {
    const number = (group ?? found).count;
    Dialog.open({
      title: `Purge ${letters(number)}?`,
      lines: [[`${letters(number)} ${description(group)} would be deleted permanently with their inputs.`, "bad"],
        ["They cannot be inspected or requeued afterwards. Dead letters that arrive meanwhile stay.", "soft"]],
      verb: `Purge ${letters(number)}`,
      act: async () => {
        const result = await Dialog.post("/dead-letters/purge", { ...selection(found, group), count: number });
        read();
        return `${letters(result.purged)} deleted. ${result.warning}`.trim();
      },
    });
  }

  // The gateway requeues 32 at a time; this repeats it until none of the confirmed ones is left.
  async function requeueAll(found, group, number, progress) {
    const sums = { completed: 0, failed: 0, unseen: 0 };
    let [left, after, warnings] = [number, 0, new Set()];
    const summary = () => `${count(sums.completed)} completed, ${count(sums.failed)} failed again` +
      (sums.unseen ? `, ${count(sums.unseen)} without a result yet` : "");
    while (left > 0) {
      let result;
      try {
        result = await Dialog.post("/dead-letters/requeue", { ...selection(found, group), count: left, after });
      } catch (error) {
        throw left === number ? error : new Error(`${summary()}; then: ${error.message}`);
      } finally {
        read();
      }
      for (const { ended } of result.reruns) sums[ended === "completed" ? "completed" : ended ? "failed" : "unseen"] += 1;
      if (result.warning) warnings.add(result.warning);
      [left, after] = [result.left, result.after];
      progress(`${summary()}; ${count(left)} to go.`);
    }
    return [`Requeued: ${summary()}.`, ...warnings].join(" ");
  }

  function confirmRequeue(found, group) {
    const number = (group ?? found).requeueable;
    Dialog.open({
      title: `Requeue ${letters(number)}?`,
      lines: [[`${letters(number)} ${description(group)} would run again now, without limits, 32 at a time.`, ""],
        ["Customers are not charged and get no response. A request that fails again becomes a new dead letter.", "soft"]],
      verb: `Requeue ${letters(number)}`,
      act: (reason, progress) => requeueAll(found, group, number, progress),
    });
  }

  // --- what is shown --------------------------------------------------------------------------------------------------

  function button(text, number, act) {
    const made = element("button", text);
    made.type = "button";
    made.disabled = number === 0 || number > MOST;
    if (number > MOST) made.title = `More than ${count(MOST)}: by group, or with tierlane dlq`;
    made.addEventListener("click", act);
    return made;
  }

  function row(found, group) {
    const line = element("tr");
    const figures = group ?? found;
    const cells = group ? [named(group.tier), named(group.model), group.error_code] : ["all", "", ""];
    cells.push(count(figures.count), count(figures.requeueable), group ? day(Date.parse(group.oldest)) : "");
    const units = ["", "", "", "in all", "can run again", "the oldest"];
    line.append(...cells.map((text, at) => {
      const cell = element("td", text);
      if (at === 2 && group) cell.replaceChildren(codeLink(group.error_code));
      if (text) cell.dataset.unit = units[at]; // Shown on phones, without headings.
      return cell;
    }));
    const actions = element("td");
    const [requeue, purge] = [
      button("Requeue", figures.requeueable, () => confirmRequeue(found, group)),
      button("Purge", figures.count, () => confirmPurge(found, group)),
    ];
    const of = group ? description(group) : "of all kinds";
    requeue.setAttribute("aria-label", `Requeue ${letters(figures.requeueable)} ${of}`);
    purge.setAttribute("aria-label", `Purge ${letters(figures.count)} ${of}`);
    if (group) {
      const newest = viewLink("request", group.newest_request);
      newest.textContent = "Newest request";
      newest.setAttribute("aria-label", `Newest request ${of}`);
      actions.append(newest);
    }
    actions.append(requeue, purge);
    line.append(actions);
    return line;
  }

  function draw(found) {
    const now = JSON.stringify(found);
    by("dead-letters").hidden = found.count === 0;
    by("dead-letters-summary").className = "";
    by("dead-letters-summary").textContent = found.count ? `${letters(found.count)}, ${count(found.requeueable)} of which can run again.` : "None.";
    if (now === drawn) return;
    drawn = now;
    const at = [...by("dead-letters").querySelectorAll("button")].indexOf(document.activeElement);
    const rows = found.groups.map((group) => row(found, group));
    if (found.groups.length > 1) rows.push(row(found, null));
    by("dead-letters").tBodies[0].replaceChildren(...rows);
    if (at >= 0) by("dead-letters").querySelectorAll("button")[at]?.focus();
  }

  async function read() {
    if (reading) {
      again = true; // The running read may have started before the action.
      return;
    }
    reading = true;
    readAt = performance.now();
    try {
      const answer = await fetch(`${Dialog.BASE}/dead-letters`);
      const result = await answer.json();
      if (!answer.ok) throw new Error(result.error.message);
      draw(result);
    } catch (error) {
      by("dead-letters").hidden = true;
      drawn = "";
      by("dead-letters-summary").className = "bad";
      by("dead-letters-summary").textContent = `Dead letters cannot be counted: ${error.message}`;
    } finally {
      reading = false;
    }
    if (again) {
      again = false;
      read();
    }
  }

  function show(state) {
    if (state.dlq === counted && performance.now() - readAt < EVERY_MS) return;
    counted = state.dlq;
    read();
  }

  return { show };
})();
