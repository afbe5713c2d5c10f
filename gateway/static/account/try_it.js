// A request to a model: the answer, streamed if the model streams, its time, and the same request with curl.
"use strict";

const TryIt = (() => {
  const by = (id) => document.getElementById(id);
  const { time, coded } = Format;
  const PATH = "/v1/completions";
  let running = null;

  function body() {
    const document = { model: by("model").value, prompt: by("prompt").value, max_tokens: Number(by("max-tokens").value) };
    return by("stream").checked ? { ...document, stream: true, stream_options: { include_usage: true } } : document;
  }

  // No more tokens than the context of the model, if that is known.
  function limitTokens() {
    by("max-tokens").max = by("model").selectedOptions[0]?.dataset.tokens ?? "";
  }

  // In quotes of a POSIX shell; the key is a variable.
  function showCommand() {
    const data = JSON.stringify(body()).replaceAll("'", "'\\''");
    by("curl").textContent = `curl -s${by("stream").checked ? "N" : ""} ${location.origin}${PATH} \\\n  -H "Authorization: Bearer $TIERLANE_API_KEY" \\\n  -H 'Content-Type: application/json' \\\n  -d '${data}'`;
  }

  // The data of each event. Throws the error of an event, and for a stream without its end.
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The stream ended before its end.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.filter((each) => each.startsWith("data: "))) {
        if (line === "data: [DONE]") return;
        const data = JSON.parse(line.slice(6));
        if (data.error) throw Object.assign(new Error(data.error.message), { code: data.error.code });
        yield data;
      }
    }
  }

  async function receive(answer, begin) {
    const streamed = answer.headers.get("Content-Type")?.startsWith("text/event-stream");
    let [first, usage] = [null, null];
    by("answer").hidden = false;
    for await (const data of streamed ? events(answer) : [await answer.json()]) {
      const text = data.choices?.[0]?.text ?? "";
      if (text && first === null) first = performance.now() - begin;
      by("answer").append(text);
      usage = data.usage ?? usage;
    }
    const parts = [`Complete after ${time(performance.now() - begin)}`];
    if (streamed && first !== null) parts.push(`first text after ${time(first)}`);
    if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    return `${parts.join(", ")}. Request ${answer.headers.get("x-request-id")}.`;
  }

  async function send(event) {
    event.preventDefault();
    stop();
    const current = (running = new AbortController());
    by("answer").textContent = by("try-fault").textContent = "";
    by("try-status").textContent = "Sent …";
    [by("send").disabled, by("stop").disabled] = [true, false];
    try {
      const begin = performance.now();
      const status = await receive(await Session.send(PATH, { method: "POST", body: body(), signal: current.signal }), begin);
      if (running === current) by("try-status").textContent = status;
    } catch (error) {
      if (running !== current) return;
      by("try-status").textContent = error.name === "AbortError" ? "Stopped." : error.requestId ? `Request ${error.requestId}.` : "";
      if (error.name !== "AbortError") by("try-fault").replaceChildren(...coded(error.code ? `${error.message} (\`${error.code}\`)` : error.message));
    } finally {
      if (running === current) finish();
    }
    Account.refresh();
  }

  function finish() {
    running = null;
    [by("send").disabled, by("stop").disabled] = [false, true];
  }

  function stop() {
    running?.abort();
  }

  async function models() {
    try {
      const { data } = await Session.read("/v1/models");
      by("model").replaceChildren(...data.map(({ id, max_model_len: tokens }) => {
        const option = Object.assign(Format.element("option", id), { value: id });
        if (tokens) option.dataset.tokens = tokens;
        return option;
      }));
      limitTokens();
      showCommand();
    } catch (error) {
      if (Session.isOpen()) by("try-fault").replaceChildren(...coded(error.message));
    }
  }

  function clear() {
    stop();
    finish();
    by("try").reset();
    by("answer").hidden = true;
    for (const id of ["answer", "curl", "try-status", "try-fault", "model"]) by(id).replaceChildren();
  }

  by("try").addEventListener("submit", send);
  by("try").addEventListener("input", showCommand);
  by("model").addEventListener("change", limitTokens);
  by("stop").addEventListener("click", stop);
  by("copy-curl").addEventListener("click", () => Lists.copy(by("curl").textContent));

  return { models, clear };
})();
