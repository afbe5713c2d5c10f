// The tiers, and the page of one tier.
"use strict";

const Tiers = (() => {
  const { list } = Format;

  async function all() {
    const rows = await Api.all("/tiers");
    return { title: "Tiers", nodes: Parts.cards("Tiers by priority", ["Tier", "Priority", "Guaranteed", "Requests/s", "Burst", "Concurrency", "Quotas", "Customers"], rows.map((each) =>
      [Parts.link(each.name, "tier", { name: each.name }), String(each.priority), `${Math.round(each.guaranteed_share * 100)} %`, Parts.value(each.requests_per_second),
        Parts.value(each.burst), Parts.value(each.max_concurrency), each.quotas.join(", ") || "–", Parts.link(String(each.customers), "customers", { tier: each.name })])) };
  }

  async function one(query, refresh) {
    const path = `/tiers/${encodeURIComponent(query.name)}`;
    const tier = await Api.get(path);
    const change = () => Forms.edit({
      title: `Change tier ${tier.name}`, path, schema: "TierChanges", lines: [[`Customers without a value of their own get it; the tier has ${tier.customers}. An empty field is null.`, "soft"]],
      done: () => {
        refresh();
        return `Tier ${tier.name} is changed.`;
      },
    });
    const fields = Object.entries(tier).filter(([name]) => !["name", "quotas", "customers"].includes(name));
    return { title: `Tier ${tier.name}`, nodes: [
      Parts.actions([["administer", "Change tier", change]]),
      list([...fields.map(([name, value]) => [name, Parts.value(value)]), ["customers", Parts.link(String(tier.customers), "customers", { tier: tier.name })]]),
      ...(await Quotas.ofTier(tier.name, refresh))] };
  }

  return { all, one };
})();
