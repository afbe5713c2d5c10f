// Parts of views: buttons that the role allows, bars, times, and the table of a change.
"use strict";

const Parts = (() => {
  const { element, table, count } = Format;
  const WARN = 0.8;

  // `key` names the button, so that it gets the focus again after the view was replaced.
  function button(label, key, act, about) {
    const made = element("button", label);
    made.type = "button";
    made.dataset.key = key;
    if (about) made.setAttribute("aria-label", `${label} ${about}`);
    made.addEventListener("click", async () => {
      try {
        await act();
      } catch (error) {
        Dialog.notify(error.message, "bad");
      }
    });
    return made;
  }

  // Buttons for [action, label, act, about]; what the role does not allow is named with the role that it needs.
  function actions(wanted) {
    const line = element("p", undefined, "actions");
    line.append(...buttons(wanted));
    const rest = refused(wanted);
    if (rest) line.append(rest);
    return line;
  }

  const buttons = (wanted) => wanted.filter(([action]) => Api.may(action)).map(([, label, act, about]) => button(label, `${label} ${about ?? ""}`, act, about));

  function refused(wanted) {
    const rest = wanted.filter(([action]) => !Api.may(action)).map(([action, label]) => `${label} (needs ${Api.needed(action)})`);
    return rest.length ? element("span", `Your role ${Api.session()?.role} does not allow: ${rest.join(", ")}.`, "soft") : null;
  }

  const number = (value, unit) => (unit === "usd" ? value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 }) : count(value));

  function usageBar({ quota, tier, unit, used, amount, until }) {
    const share = amount ? used / amount : 0;
    const node = element("div", undefined, `bar ${share >= 1 ? "full" : share >= WARN ? "near" : ""}`);
    const progress = Object.assign(element("progress"), { max: 1, value: Math.min(1, share) });
    progress.setAttribute("aria-label", `${quota}: ${Math.round(share * 100)} % used`);
    const text = element("span", `${number(used, unit)} of ${number(amount, unit)} ${unit} (${Math.round(share * 100)} %)`);
    node.title = `${quota}${tier ? ` of tier ${tier}` : ""}; resets ${when(until)}`;
    node.append(progress, text);
    return node;
  }

  // A table whose rows are cards on a phone.
  const cards = (caption, headings, rows) => table(caption, headings, rows, "plain cards");

  const two = (value) => String(value).padStart(2, "0");

  // The time of this browser: 2026-11-30 09:05:00.
  function when(iso) {
    if (!iso) return null;
    const at = new Date(iso);
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  }

  function value(given) {
    if (given === null || given === undefined) return "null";
    return Array.isArray(given) ? given.join(", ") || "none" : typeof given === "boolean" || given === "" ? JSON.stringify(given) : String(given);
  }

  // The fields that differ between the rows before and after.
  function changeTable(caption, { old, new: next }, headings = ["Field", "Now", "Then"]) {
    const names = [...new Set([...Object.keys(old ?? {}), ...Object.keys(next ?? {})])];
    const changed = names.filter((name) => JSON.stringify(old?.[name]) !== JSON.stringify(next?.[name]));
    return table(caption, headings, changed.map((name) => [element("code", name), value(old?.[name]), value(next?.[name])]));
  }

  function link(text, view, query = {}) {
    const made = element("a", text);
    made.href = `#${view}${Api.queryText(query)}`;
    return made;
  }

  // Opens a view, also again.
  function go(view, query) {
    const next = `#${view}${Api.queryText(query)}`;
    if (next === location.hash) dispatchEvent(new Event("hashchange"));
    else location.hash = next;
  }

  function select(options, chosen, label) {
    const made = element("select");
    if (label) made.setAttribute("aria-label", label);
    made.append(...options.map(([each, text]) => Object.assign(element("option", text ?? each), { value: each })));
    made.value = chosen;
    return made;
  }

  return { button, buttons, actions, refused, number, usageBar, cards, when, value, changeTable, link, go, select };
})();
