// OpenAI's client for JavaScript on /v1/responses.

import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API, KEY, MODEL, PNG, WRONG_KEY, collected, report, sawImage } from "./features.js";

const client = new OpenAI({ baseURL: API, apiKey: KEY, maxRetries: 0 });
const WEATHER = z.object({ q: z.string(), at: z.number() });
const ANSWER = z.object({ answer: z.string() });
const TOOLS = [zodResponsesFunction({ name: "Weather", parameters: WEATHER })];
const create = (options) => client.responses.create({ model: MODEL, input: "hello", ...options });

await report({
  async text() {
    assert.equal((await create({})).output_text, "olleh");
    assert.ok((await client.responses.inputTokens.count({ model: MODEL, input: "hello" })).input_tokens > 0);
  },
  async stream() {
    const stream = client.responses.stream({ model: MODEL, input: "hello" });
    let text = "";
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    assert.equal((await stream.finalResponse()).output_text, "olleh");
    assert.equal(text, "olleh");
  },
  async tools() {
    const first = await client.responses.parse({ model: MODEL, input: "hello", tools: TOOLS });
    const [call] = first.output;
    WEATHER.parse(call.parsed_arguments);
    const result = { type: "function_call_output", call_id: call.call_id, output: "21 °C" };
    assert.equal((await create({ previous_response_id: first.id, input: [result] })).output_text, "C° 12");
    const history = [{ role: "user", content: "hello" }, ...first.output, result];
    assert.equal((await create({ input: history })).output_text, "C° 12");
  },
  async "streamed tools"() {
    const stream = client.responses.stream({ model: MODEL, input: "hello", tools: TOOLS });
    let deltas = 0;
    stream.on("response.function_call_arguments.delta", () => (deltas += 1));
    WEATHER.parse((await stream.finalResponse()).output[0].parsed_arguments);
    assert.ok(deltas > 1);
  },
  async "structured output"() {
    const text = { format: zodTextFormat(ANSWER, "answer") };
    ANSWER.parse((await client.responses.parse({ model: MODEL, input: "hello", text })).output_parsed);
  },
  async image() {
    const image = { type: "input_image", image_url: `data:image/png;base64,${PNG}`, detail: "auto" };
    const content = [{ type: "input_text", text: "What is this?" }, image];
    assert.ok(sawImage((await create({ input: [{ role: "user", content }] })).output_text));
  },
  async stored() {
    const first = await create({});
    assert.equal((await create({ input: "you", previous_response_id: first.id })).output_text, "uoy");
    assert.equal((await client.responses.retrieve(first.id)).output_text, "olleh");
    await client.responses.delete(first.id);
    await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
  },
  async background() {
    let response = await create({ background: true });
    for (const until = Date.now() + 20_000; Date.now() < until; await setTimeout(50)) {
      if (!["queued", "in_progress"].includes(response.status)) break;
      response = await client.responses.retrieve(response.id);
    }
    assert.deepEqual([response.status, response.output_text], ["completed", "olleh"]);
    let last;
    for await (const event of await create({ background: true, stream: true })) {
      last = event;
      break;
    }
    const rest = await client.responses.retrieve(last.response.id, { stream: true, starting_after: 0 });
    assert.equal((await collected(rest)).at(-1).response.output[0].content[0].text, "olleh");
  },
  async "wrong key"() {
    const stranger = client.withOptions({ apiKey: WRONG_KEY });
    await assert.rejects(stranger.responses.create({ model: MODEL, input: "hello" }), OpenAI.AuthenticationError);
  },
});
