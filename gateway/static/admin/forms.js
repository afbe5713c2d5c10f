// Forms made from the description of the API: each field of a body with its type and its sentence. A new column of a table
// needs no change here.
"use strict";

const Forms = (() => {
  const { element } = Format;
  let description = null;
  let made = 0;

  async function fieldsOf(schema) {
    description ??= Api.get("/openapi.json").catch((error) => {
      description = null;
      throw error;
    });
    const { properties, required } = (await description).components.schemas[schema];
    return Object.entries(properties).map(([name, given]) => {
      const type = given.anyOf?.find((each) => each.type !== "null") ?? given;
      return { name, type, nullable: Boolean(given.anyOf), hint: given.description ?? type.description ?? "", required: required.includes(name) };
    });
  }

  const isTime = (field) => field.type.format === "date-time";

  // The text of a value in its field; empty: null.
  function textOf(field, value) {
    if (value === null || value === undefined) return "";
    if (isTime(field)) return Parts.when(value).replace(" ", "T");
    return Array.isArray(value) ? value.join(", ") : String(value);
  }

  function valueOf(field, text) {
    if (text === "" && (field.nullable || field.type.type !== "string")) return null;
    switch (field.type.type) {
      case "number":
      case "integer":
        if (Number.isNaN(Number(text))) throw Object.assign(new Error(`\`${field.name}\` must be a number.`), { param: field.name });
        return Number(text);
      case "boolean":
        return text === "true";
      case "array":
        return text.split(",").map((each) => each.trim()).filter(Boolean);
      default:
        return isTime(field) ? new Date(text).toISOString() : text;
    }
  }

  function inputOf(field, choices) {
    const options = choices ?? field.type.enum ?? (field.type.type === "boolean" ? ["false", "true"] : null);
    if (options) return Parts.select([...(field.nullable || (!choices && !field.required) ? [["", "–"]] : []), ...options.map((each) => [each])], "");
    const input = element("input");
    input.autocomplete = "off";
    input.spellcheck = false;
    if (isTime(field)) Object.assign(input, { type: "datetime-local", step: 1 });
    else if (["number", "integer"].includes(field.type.type)) input.inputMode = "decimal";
    return input;
  }

  function line(field, input) {
    const node = element("p", undefined, "field");
    const label = element("label", field.name);
    const hint = element("span", field.hint, "soft");
    made += 1;
    Object.assign(input, { id: `field-${made}`, required: field.required });
    Object.assign(hint, { id: `hint-${made}` });
    Object.assign(label, { htmlFor: input.id });
    input.setAttribute("aria-describedby", hint.id);
    node.append(label, input, hint);
    return node;
  }

  // `row`: the values at first. `first`: names of fields at the top, the others follow folded. `choices`: name -> values.
  async function build(schema, { row = {}, first = null, choices = {}, skip = [] } = {}) {
    const fields = (await fieldsOf(schema)).filter((field) => !skip.includes(field.name));
    const node = element("div", undefined, "fields");
    const rest = element("details");
    const restFields = element("div", undefined, "fields");
    rest.append(element("summary", "More fields"), restFields);
    for (const field of fields) {
      field.input = inputOf(field, choices[field.name]);
      field.line = line(field, field.input);
      field.input.value = textOf(field, row[field.name]);
      field.initial = field.input.value;
    }
    const top = first === null ? fields : first.map((name) => fields.find((field) => field.name === name)).filter(Boolean);
    node.append(...top.map((field) => field.line));
    restFields.append(...fields.filter((field) => !top.includes(field)).map((field) => field.line));
    if (restFields.children.length) node.append(rest);
    node.addEventListener("keydown", (event) => event.key === "Enter" && event.target.matches("input") && Dialog.carryOut());

    // The values that were typed. A number that is none throws an error.
    const changes = () => Object.fromEntries(fields.filter((field) => field.input.value !== field.initial).map((field) => [field.name, valueOf(field, field.input.value.trim())]));

    // Shows the row as it is now; what was typed stays.
    function rebase(next) {
      for (const field of fields) {
        const typed = field.input.value !== field.initial;
        field.initial = textOf(field, next[field.name]);
        if (!typed) field.input.value = field.initial;
      }
    }

    // Marks the field that an error names.
    function mark(name) {
      for (const field of fields) field.input.setAttribute("aria-invalid", String(field.name === name));
      const found = fields.find((field) => field.name === name);
      if (!found) return;
      if (rest.contains(found.input)) rest.open = true;
      found.input.focus();
    }

    return { node, changes, rebase, mark, focus: () => fields.length && top[0]?.input.focus() };
  }

  // A dialog with a form. `send` gets the values and returns the notice or the next dialog; undefined: it stays open.
  function open({ title, lines, form, below = [], verb, send }) {
    const act = async () => {
      form.mark(null);
      try {
        return await send(form.changes());
      } catch (error) {
        form.mark(error.param);
        throw error;
      }
    };
    Dialog.open({ title, lines, fields: [form.node, ...below], verb, act });
    form.focus();
  }

  // Changes a row: fields, a preview of what changes, and If-Match. After a 412 the row is read again and what was typed stays.
  async function edit({ title, lines, path, schema, first, choices, skip, done }) {
    let { found: row, etag } = await Api.send("GET", path);
    const form = await build(schema, { row, first, choices, skip });
    const preview = element("div");
    preview.setAttribute("role", "status");
    let previewed = null;
    let stale = false;

    function show(nodes, verb) {
      preview.replaceChildren(...nodes);
      preview.scrollIntoView({ block: "nearest" });
      Dialog.setVerb(verb);
    }

    async function reload() {
      const old = row;
      ({ found: row, etag } = await Api.send("GET", path));
      form.rebase(row);
      stale = false;
      show(Parts.changeTable("Changed by somebody else", { old, new: row }, ["Field", "Was", "Is"]), "Preview");
    }

    async function send(values) {
      if (stale) return reload();
      if (!Object.keys(values).length) throw new Error("No field was changed.");
      const body = JSON.stringify(values);
      const dry = body !== previewed;
      try {
        const { found } = await Api.send("PATCH", `${path}${dry ? "?dry_run=true" : ""}`, values, { "If-Match": etag });
        if (!dry) return done();
        previewed = body;
        return show(Parts.changeTable("Preview", found.changes.at(-1)), "Apply");
      } catch (error) {
        if (error.status !== 412) throw error;
        stale = true;
        previewed = null;
        show([], "Reload, keep my input");
        throw new Error("Somebody else changed this since you opened it. Nothing was changed. Reload it: what you typed is kept.");
      }
    }

    form.node.addEventListener("input", () => {
      if (stale) return;
      previewed = null;
      show([], "Preview");
    });
    open({ title, lines, form, below: [preview], verb: "Preview", send });
  }

  return { build, open, edit };
})();
