// Workers: those of the audit's last ten minutes and the cordoned ones. A cordoned worker is drained.
"use strict";

const Workers = (() => {
  const { element, count } = Format;

  function cordon(worker, refresh) {
    Dialog.open({
      title: `Cordon ${worker}?`, verb: "Cordon", reason: true,
      lines: [["It is drained: it finishes what it runs and gets no new work, also after a restart, until it is uncordoned."],
        ["What the other GPUs can serve without it is on the dashboard.", "soft"]],
      act: async (reason) => {
        await Api.send("PUT", `/cordons/${encodeURIComponent(worker)}`, { reason });
        refresh();
        return `${worker} is cordoned.`;
      },
    });
  }

  function uncordon(worker, refresh) {
    Dialog.open({
      title: `Uncordon ${worker}?`, verb: "Uncordon", lines: [["It gets new work again."]],
      act: async () => {
        await Api.send("DELETE", `/cordons/${encodeURIComponent(worker)}`);
        refresh();
        return `${worker} is uncordoned.`;
      },
    });
  }

  // A worker that ran nothing lately is not in the list.
  function other(refresh) {
    if (!Api.may("cordon")) return [];
    const form = element("form", undefined, "filters");
    const field = Object.assign(element("input"), { required: true, autocomplete: "off", placeholder: "Id of another worker" });
    field.setAttribute("aria-label", "Id of another worker");
    form.append(field, element("button", "Cordon it"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      cordon(field.value.trim(), refresh);
    });
    return [form];
  }

  async function all(query, refresh) {
    const rows = await Api.all("/workers");
    const verbs = (each) => [each.cordon ? ["cordon", "Uncordon", () => uncordon(each.worker, refresh), each.worker] : ["cordon", "Cordon", () => cordon(each.worker, refresh), each.worker]];
    const refused = Parts.refused([["cordon", "Cordon and uncordon"]]);
    return { title: "Workers", nodes: [
      ...Parts.cards("Workers with requests of the last ten minutes, and cordoned ones", ["Worker", "Requests", "Last request", "State", "Action"], rows.map((each) =>
        [each.worker, count(each.requests), Parts.when(each.last_request_at), each.cordon ? element("span", `cordoned: ${each.cordon.reason || "no reason given"}`, "warn") : "gets work", Parts.buttons(verbs(each))[0] ?? ""])),
      ...other(refresh), ...(refused ? [refused] : []),
      element("p", "By the audit, which does not know idle workers. Health and load of all workers are on the dashboard of the gateways.", "soft")] };
  }

  return { all };
})();
