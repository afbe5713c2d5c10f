// Figures as text, and elements that contain text only: the name of a worker or a customer never becomes markup.
"use strict";

const Format = (() => {
  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // Nodes of a sentence: what is between backticks is code. A backtick without a partner is text.
  function coded(text) {
    const parts = text.split("`");
    return parts.length % 2 ? parts.map((part, at) => (at % 2 ? element("code", part) : part)) : [text];
  }

  // An element with a sentence of the gateway, which may contain code.
  function sentence(name, text, className) {
    const made = element(name, undefined, className);
    made.append(...coded(text ?? ""));
    return made;
  }

  // `kind` is customer, request, worker: a view of this page. The name is escaped.
  function viewLink(kind, name, className) {
    const made = element("a", name, className);
    made.href = `#${kind}=${encodeURIComponent(name)}`;
    return made;
  }

  function codeLink(code) {
    const made = element("a", code);
    made.href = `/docs#error-${encodeURIComponent(code)}`;
    return made;
  }

  // A list of [label, value, class] without those that are empty.
  function list(pairs) {
    const node = element("dl", undefined, "facts");
    for (const [label, value, className] of pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)) {
      const shown = element("dd", undefined, className);
      shown.append(value);
      node.append(element("dt", label), shown);
    }
    return node;
  }

  // A heading and a table, which scrolls sideways. `rows`: of texts, nodes or null. Each cell has the name of its column.
  function table(caption, headings, rows, className = "plain") {
    if (!rows.length) return [element("h3", caption), element("p", "None.", "soft")];
    const node = element("table", undefined, className);
    const [head, body] = [element("thead"), element("tbody")];
    const titles = element("tr");
    titles.append(...headings.map((each) => Object.assign(element("th", each), { scope: "col" })));
    head.append(titles);
    for (const row of rows) {
      const line = element("tr");
      row.forEach((value, at) => {
        const cell = element("td");
        cell.dataset.column = headings[at];
        cell.append(value ?? "–");
        line.append(cell);
      });
      body.append(line);
    }
    node.append(head, body);
    const scroll = element("div", undefined, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", caption);
    scroll.append(node);
    return [element("h3", caption), scroll];
  }

  // Replaces the content of a place if it differs, and keeps the focus on the link with the same target.
  function replace(place, nodes) {
    const next = element("div");
    next.append(...nodes);
    if (next.childNodes.length === place.childNodes.length && [...next.childNodes].every((node, at) => node.isEqualNode(place.childNodes[at]))) return;
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    place.replaceChildren(...next.childNodes);
    if (focused) [...place.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  }

  const count = (value) => (value >= 100 ? Math.round(value) : Math.round(value * 10) / 10).toLocaleString("en");
  const percent = (value) => `${Math.round(value * 100)} %`;
  const time = (ms) => (ms >= 10000 ? `${Math.round(ms / 1000)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`);
  const day = (ms) => new Date(ms).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  // With the day unless it is today.
  const clock = (ms) => `${day(ms) === day(Date.now()) ? "" : `${day(ms)} `}${new Date(ms).toLocaleTimeString("en-GB")}`;
  // The id of a gateway ends with 32 hexadecimal digits.
  const processName = (id) => id.replace(/-[0-9a-f]{32}$/, "");
  const shedShare = (tier) => (tier.shed_rps > 0 ? Math.min(1, tier.shed_rps / Math.max(tier.in_rps, tier.shed_rps)) : 0);

  return { element, coded, sentence, list, table, viewLink, codeLink, replace, count, percent, time, clock, processName, shedShare };
})();
