// Quotas and budgets of a customer or a tier: bars of what is used, set, and remove.
"use strict";

const Quotas = (() => {
  const { element } = Format;

  async function set(owner, refresh) {
    const form = await Forms.build("NewQuota", { first: ["quota"], skip: ["customer", "tier"] });
    const [name] = Object.values(owner);
    Forms.open({
      title: `Set a quota or budget of ${name}`, form, verb: "Set", lines: [["It replaces the quota of the same period and unit.", "soft"]],
      send: async (values) => {
        await Api.send("POST", "/quotas", { quota: "", ...values, ...owner });
        refresh();
        return `The quota ${values.quota} of ${name} is set.`;
      },
    });
  }

  function remove(row, name, refresh) {
    Dialog.open({
      title: `Remove the quota ${row.quota} of ${name}?`, lines: [["Requests are no longer limited by it."]], verb: "Remove",
      act: async () => {
        await Api.send("DELETE", `/quotas/${row.id}`);
        refresh();
        return `The quota ${row.quota} of ${name} is removed.`;
      },
    });
  }

  const removal = (row, name, refresh) => Parts.buttons([["administer", "Remove", () => remove(row, name, refresh), row.quota]])[0] ?? "";

  // `customer`: its row.
  async function section(customer, refresh) {
    const { data } = await Api.get("/quota-usage", { customer: customer.id });
    const rows = data[0].quotas.map((each) => [element("code", each.quota), Parts.usageBar(each), Parts.when(each.until),
      each.tier === null ? "customer" : Parts.link(`tier ${each.tier}`, "tier", { name: each.tier }),
      each.tier === null ? removal(each, customer.name, refresh) : ""]);
    return [...Parts.cards("Quotas and budgets", ["Quota", "Used", "Resets", "Set for", "Action"], rows),
      Parts.actions([["administer", "Set quota or budget", () => set({ customer: customer.name }, refresh)]])];
  }

  async function ofTier(tier, refresh) {
    const rows = await Api.all("/quotas", { tier });
    return [...Parts.cards("Quotas of each customer of the tier", ["Quota", "Action"], rows.map((each) => [element("code", each.quota), removal(each, `tier ${tier}`, refresh)])),
      Parts.actions([["administer", "Set quota or budget", () => set({ tier }, refresh)]])];
  }

  return { section, ofTier };
})();
