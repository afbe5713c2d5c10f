// The errors of the last minute by code and tier, the most frequent first; each code links to its description.
"use strict";

const Errors = (() => {
  const by = (id) => document.getElementById(id);
  const { element, codeLink, count, replace } = Format;

  function heading(name, scope = "col") {
    const cell = element("th");
    cell.scope = scope;
    cell.append(name);
    return cell;
  }

  // It may be continued in the next line after an underscore.
  function breakable(code) {
    const link = codeLink(code);
    link.replaceChildren(...code.split(/(?<=_)/).flatMap((part) => [part, element("wbr")]));
    return link;
  }

  function row(code, tiers, total) {
    const line = element("tr");
    const cells = tiers.map((tier) => element("td", tier.errors_60s?.[code] ? count(tier.errors_60s[code]) : "–"));
    line.append(heading(breakable(code), "row"), ...cells, element("td", count(total)));
    return line;
  }

  // `figures`: of all pools, or of the pool that is shown.
  function show(figures) {
    const { tiers } = figures;
    const totals = new Map();
    // Gateways of older versions do not send them.
    for (const tier of tiers) for (const [code, number] of Object.entries(tier.errors_60s ?? {})) totals.set(code, (totals.get(code) ?? 0) + number);
    const rows = [...totals].sort((a, b) => b[1] - a[1]).map(([code, total]) => row(code, tiers, total));
    by("no-errors").hidden = rows.length > 0;
    by("errors").hidden = rows.length === 0;
    replace(document.querySelector("#errors thead tr"), ["Code", ...tiers.map((tier) => tier.name), "all"].map((name) => heading(name)));
    replace(document.querySelector("#errors tbody"), rows);
  }

  return { show };
})();
