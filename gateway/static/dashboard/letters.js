// Dead letters as PostgreSQL counts them, and what can be done with those that are shown: with them, and with no others.
"use strict";

const Letters = (() => {
  const EVERY_MS = 15000;
  const MOST = 10000;
  const { element, count, clock } = Words;
  const by = (id) => document.getElementById(id);
  let looked = -Infinity;
  let counted = null;
  let looking = false;
  let again = false;
  let drawn = "";

  const letters = (number) => (number === 1 ? "1 dead letter" : `${count(number)} dead letters`);
  const named = (text) => text || "unknown";
  const day = (ms) => (Date.now() - ms > 86400000 ? new Date(ms).toLocaleDateString("en-CA") : clock(ms));

  // --- actions --------------------------------------------------------------------------------------------------------

  // What is meant, as the gateway is told it: a group, or all.
  function meant(seen, group) {
    const kind = group ? { tier: group.tier, model: group.model, error_code: group.error_code } : {};
    return { up_to: seen.up_to, ...kind };
  }

  const words = (group) => (group ? `of ${named(group.tier)}, ${named(group.model)}, ${group.error_code}` : "of all kinds");

  function askToPurge(seen, group) {
    const number = (group ?? seen).count;
    Ask.open({
      title: `Purge ${letters(number)}?`,
      lines: [[`${letters(number)} ${words(group)} would be deleted for good, inputs included.`, "bad"],
        ["What is deleted can be neither looked at nor run again. Letters that come from now on stay.", "soft"]],
      verb: `Purge ${letters(number)}`,
      act: async () => {
        const said = await Ask.post("/dead-letters/purge", { ...meant(seen, group), count: number });
        look();
        return `${letters(said.purged)} deleted. ${said.warning}`.trim();
      },
    });
  }

  // The gateway takes 32 at a time: this goes on, from where it ended, until none of those that were confirmed is left.
  async function requeueAll(seen, group, number, progress) {
    const sums = { completed: 0, failed: 0, unseen: 0 };
    let [left, after, warnings] = [number, 0, new Set()];
    const told = () => `${count(sums.completed)} completed, ${count(sums.failed)} failed again` +
      (sums.unseen ? `, of ${count(sums.unseen)} no end was seen` : "");
    while (left > 0) {
      let said;
      try {
        said = await Ask.post("/dead-letters/requeue", { ...meant(seen, group), count: left, after });
      } catch (error) {
        throw left === number ? error : new Error(`${told()}; then: ${error.message}`);
      } finally {
        look();
      }
      for (const { ended } of said.reruns) sums[ended === "completed" ? "completed" : ended ? "failed" : "unseen"] += 1;
      if (said.warning) warnings.add(said.warning);
      [left, after] = [said.left, said.after];
      progress(`${told()}; ${count(left)} to go.`);
    }
    return [`Requeued: ${told()}.`, ...warnings].join(" ");
  }

  function askToRequeue(seen, group) {
    const number = (group ?? seen).requeueable;
    Ask.open({
      title: `Requeue ${letters(number)}?`,
      lines: [[`${letters(number)} ${words(group)} would run again now, past all limits, 32 at a time.`, ""],
        ["Their customers are neither charged nor answered. What breaks the model again is a new dead letter.", "soft"]],
      verb: `Requeue ${letters(number)}`,
      act: (reason, progress) => requeueAll(seen, group, number, progress),
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

  function row(seen, group) {
    const line = element("tr");
    const figures = group ?? seen;
    const cells = group ? [named(group.tier), named(group.model), group.error_code] : ["all", "", ""];
    cells.push(count(figures.count), count(figures.requeueable), group ? day(Date.parse(group.oldest)) : "");
    const units = ["", "", "", "in all", "can run again", "the oldest"];
    line.append(...cells.map((text, at) => {
      const cell = element("td", text);
      if (text) cell.dataset.unit = units[at]; // Shown where there is no room for headings.
      return cell;
    }));
    const actions = element("td");
    const [requeue, purge] = [
      button("Requeue", figures.requeueable, () => askToRequeue(seen, group)),
      button("Purge", figures.count, () => askToPurge(seen, group)),
    ];
    const of = group ? words(group) : "of all kinds";
    requeue.setAttribute("aria-label", `Requeue ${letters(figures.requeueable)} ${of}`);
    purge.setAttribute("aria-label", `Purge ${letters(figures.count)} ${of}`);
    actions.append(requeue, purge);
    line.append(actions);
    return line;
  }

  function draw(seen) {
    const now = JSON.stringify(seen);
    by("letters").hidden = seen.count === 0;
    by("letters-said").className = "";
    by("letters-said").textContent = seen.count ? `${letters(seen.count)}, ${count(seen.requeueable)} of which can run again.` : "None.";
    if (now === drawn) return;
    drawn = now;
    const at = [...by("letters").querySelectorAll("button")].indexOf(document.activeElement);
    const rows = seen.groups.map((group) => row(seen, group));
    if (seen.groups.length > 1) rows.push(row(seen, null));
    by("letters").tBodies[0].replaceChildren(...rows);
    if (at >= 0) by("letters").querySelectorAll("button")[at]?.focus();
  }

  async function look() {
    if (looking) {
      again = true; // What is being read may be from before the action.
      return;
    }
    looking = true;
    looked = performance.now();
    try {
      const answer = await fetch(`${Ask.BASE}/dead-letters`);
      const said = await answer.json();
      if (!answer.ok) throw new Error(said.error.message);
      draw(said);
    } catch (error) {
      by("letters").hidden = true;
      drawn = "";
      by("letters-said").className = "bad";
      by("letters-said").textContent = `They cannot be counted: ${error.message}`;
    } finally {
      looking = false;
    }
    if (again) {
      again = false;
      look();
    }
  }

  function show(state) {
    if (state.dlq === counted && performance.now() - looked < EVERY_MS) return;
    counted = state.dlq;
    look();
  }

  return { show };
})();
