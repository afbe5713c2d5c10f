// The few customers that ask most now, over all gateways.
"use strict";

const Customers = (() => {
  const { element, count } = Words;

  function line(customer) {
    const shown = element("li");
    shown.append(element("b", customer.name), element("span", ` ${customer.tier} · ${count(customer.rps)}/s`, "soft"));
    return shown;
  }

  function show(customers) {
    const lines = customers.length ? customers.map(line) : [element("li", "Nobody asks.", "soft")];
    document.getElementById("customers").replaceChildren(...lines);
  }

  return { show };
})();
