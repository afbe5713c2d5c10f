// The list of customers with bars of their quotas, and the page of one customer.
"use strict";

const Customers = (() => {
  const { element, list, table } = Format;
  const PART = 50;
  const ERRORS = 10;
  const WEEK_MS = 7 * 86400000;

  async function create() {
    const tiers = (await Api.get("/tiers")).data.map((each) => each.name);
    const form = await Forms.build("NewCustomer", { first: ["name", "tier"], choices: { tier: tiers } });
    Forms.open({
      title: "Create a customer", form, verb: "Create",
      send: async (values) => {
        await Api.send("POST", "/customers", { name: "", ...values });
        Parts.go("customer", { name: values.name });
        return `Customer ${values.name} is created.`;
      },
    });
  }

  // --- list -----------------------------------------------------------------------------------------------------------

  // The bars come later than the rows: they are counted in the audit.
  async function showBars(places, query) {
    try {
      const { data } = await Api.get("/quota-usage", query);
      for (const each of data) {
        const bars = each.quotas.map(Parts.usageBar);
        places.get(each.customer_id)?.replaceChildren(...(bars.length ? bars : [element("span", "no quota", "soft")]));
      }
    } catch (error) {
      for (const place of places.values()) place.replaceChildren(element("span", error.message, "bad"));
    }
  }

  async function part(query) {
    const { data, next } = await Api.get("/customers", query);
    const places = new Map(data.map((each) => [each.id, element("div", "…", "bars")]));
    const rows = data.map((each) => [Parts.link(each.name, "customer", { name: each.name }), each.tier,
      element("span", each.status, each.status === "active" ? "" : "bad"), String(each.live_keys), places.get(each.id)]);
    showBars(places, query);
    return { rows, next };
  }

  async function all(query) {
    const tiers = (await Api.get("/tiers")).data.map((each) => each.name);
    const form = element("form", undefined, "filters");
    const search = Object.assign(element("input"), { type: "search", value: query.search ?? "", autocomplete: "off", placeholder: "Part of the name" });
    search.setAttribute("aria-label", "Search customers by name");
    const tier = Parts.select([["", "all tiers"], ...tiers.map((each) => [each])], query.tier ?? "", "Tier");
    const status = Parts.select([["", "any status"], ["active"], ["suspended"]], query.status ?? "", "Status");
    const find = element("button", "Search");
    form.append(search, tier, status, find);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      Parts.go("customers", { search: search.value.trim(), tier: tier.value, status: status.value });
    });
    const found = await part({ ...query, limit: PART });
    const more = found.next === null ? [] : [Parts.link("Next customers", "customers", { ...query, after: found.next })];
    return { title: "Customers", nodes: [Parts.actions([["administer", "Create customer", create]]), form,
      ...Parts.cards("Customers by name", ["Customer", "Tier", "Status", "Live keys", "Quotas and budgets"], found.rows), ...more] };
  }

  // --- one customer ---------------------------------------------------------------------------------------------------

  async function change(customer, refresh) {
    const tiers = (await Api.get("/tiers")).data.map((each) => each.name);
    return Forms.edit({
      title: `Change customer ${customer.name}`, path: `/customers/${customer.id}`, schema: "CustomerChanges", choices: { tier: tiers }, skip: ["status"],
      first: ["tier", "models"], lines: [["An empty field is null: the value of the tier, or all models.", "soft"]],
      done: () => {
        refresh();
        return `Customer ${customer.name} is changed.`;
      },
    });
  }

  function setStatus(customer, etag, refresh) {
    const status = customer.status === "active" ? "suspended" : "active";
    Dialog.open({
      title: status === "active" ? `Activate ${customer.name}?` : `Suspend ${customer.name}?`, verb: status === "active" ? "Activate" : "Suspend",
      lines: [[status === "active" ? "Its requests are accepted again." : "Every request of its keys is rejected with 403 within a second."]],
      act: async () => {
        await Api.send("PATCH", `/customers/${customer.id}`, { status }, { "If-Match": etag });
        refresh();
        return `Customer ${customer.name} is ${status}.`;
      },
    });
  }

  function limits(customer, tier) {
    const shared = Object.keys(customer).filter((name) => name in tier && !["name", "weight"].includes(name));
    return table("Limits", ["Limit", "In force", "Set for"], shared.map((name) => [element("code", name), Parts.value(customer[name] ?? tier[name]),
      customer[name] === null ? `tier ${tier.name}` : "customer"]));
  }

  async function lastErrors(customer) {
    const { data } = await Api.get("/requests", { customer: customer.id, status: "failed", from: new Date(Date.now() - WEEK_MS).toISOString(), limit: ERRORS });
    return [...Parts.cards("Last failed requests of seven days", ["Time", "Request", "Model", "Code"], data.map((each) =>
      [Parts.when(each.created_at), Parts.link(each.id, "request", { id: each.id }), each.model, element("code", each.error_code)])),
    Parts.link("All requests of this customer", "requests", { customer: customer.name })];
  }

  async function lastChanges(customer) {
    const { data } = await Api.get("/config-changes", { customer: customer.id, limit: ERRORS });
    const fields = (each) => Object.keys(each.new ?? {}).filter((name) => each.old && JSON.stringify(each.old[name]) !== JSON.stringify(each.new[name]));
    return Parts.cards("Last changes", ["Time", "By", "Row", "Change"], data.map((each) => [Parts.when(each.changed_at), each.changed_by, each.table_name,
      each.old === null ? "created" : each.new === null ? "deleted" : fields(each).map((name) => `${name}: ${Parts.value(each.old[name])} → ${Parts.value(each.new[name])}`).join("; ")]));
  }

  // Nodes of a part that may fail alone, such as a query that takes too long.
  const alone = (loading) => loading.catch((error) => [element("p", error.message, "bad")]);

  async function one(query, refresh) {
    const { found: customer, etag } = await Api.send("GET", `/customers/${encodeURIComponent(query.name)}`);
    const tier = await Api.get(`/tiers/${encodeURIComponent(customer.tier)}`);
    const verb = customer.status === "active" ? "Suspend" : "Activate";
    const sections = await Promise.all([Quotas.section(customer, refresh), Keys.section(customer, refresh), lastErrors(customer), lastChanges(customer)].map(alone));
    const [quotas, keys, errors, changes] = sections;
    return { title: `Customer ${customer.name}`, nodes: [
      list([["Tier", Parts.link(customer.tier, "tier", { name: customer.tier })], ["Status", customer.status, customer.status === "active" ? "good" : "bad"],
        ["Id", element("code", customer.id)], ["Created", Parts.when(customer.created_at)], ["Models", customer.models?.join(", ") ?? "all"],
        ["Weight", String(customer.weight)], ["Cell", customer.cell ?? ""]]),
      Parts.actions([["administer", "Change tier, limits or models", () => change(customer, refresh)], ["suspend_customer", verb, () => setStatus(customer, etag, refresh)]]),
      ...quotas, ...keys, ...Usage.section(customer.id), ...limits(customer, tier), ...errors, ...changes] };
  }

  return { all, one };
})();
