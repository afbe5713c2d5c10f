// The customers with the most GPU time in the last minute, over all gateways; each links to the view that explains it.
"use strict";

const Customers = (() => {
  const { element, count, percent, viewLink, replace } = Format;

  function line(customer) {
    const shown = element("li");
    const name = viewLink("customer", customer.name);
    shown.append(name, element("span", ` ${customer.tier} · ${count(customer.rps)}/s · ${percent(customer.gpu_share)} of its GPU time`, "soft"));
    return shown;
  }

  function show(customers) {
    replace(document.getElementById("customers"), customers.length ? customers.map(line) : [element("li", "No requests.", "soft")]);
  }

  return { show };
})();
