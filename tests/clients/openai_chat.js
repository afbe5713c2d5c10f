// OpenAI's client for JavaScript on /v1/chat/completions and /v1/embeddings.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API, EMBEDDED, KEY, MODEL, PNG, WRONG_KEY, collected, report, sawImage } from "./features.js";

const client = new OpenAI({ baseURL: API, apiKey: KEY, maxRetries: 0 });
const HELLO = [{ role: "user", content: "hello" }];
const WEATHER = z.object({ q: z.string(), at: z.number() });
const ANSWER = z.object({ answer: z.string() });
const TOOLS = [zodFunction({ name: "Weather", parameters: WEATHER })];
const create = (options) => client.chat.completions.create({ model: MODEL, messages: HELLO, ...options });

await report({
  async text() {
    const response = await create({});
    assert.equal(response.choices[0].message.content, "olleh");
    assert.ok(response.usage.total_tokens > 0);
  },
  async stream() {
    const chunks = await collected(await create({ stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "olleh");
  },
  async tools() {
    const called = await client.chat.completions.parse({ model: MODEL, messages: HELLO, tools: TOOLS });
    const { message } = called.choices[0];
    WEATHER.parse(message.tool_calls[0].function.parsed_arguments);
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "21 °C" };
    const answer = await create({ messages: [...HELLO, message, result] });
    assert.equal(answer.choices[0].message.content, "C° 12");
  },
  async "streamed tools"() {
    const runner = client.chat.completions.stream({ model: MODEL, messages: HELLO, tools: TOOLS });
    let deltas = 0;
    runner.on("tool_calls.function.arguments.delta", () => (deltas += 1));
    const completion = await runner.finalChatCompletion();
    WEATHER.parse(completion.choices[0].message.tool_calls[0].function.parsed_arguments);
    assert.ok(deltas > 1);
  },
  async "structured output"() {
    const format = zodResponseFormat(ANSWER, "answer");
    const parsed = await client.chat.completions.parse({ model: MODEL, messages: HELLO, response_format: format });
    ANSWER.parse(parsed.choices[0].message.parsed);
  },
  async image() {
    const image = { type: "image_url", image_url: { url: `data:image/png;base64,${PNG}` } };
    const response = await create({ messages: [{ role: "user", content: [{ type: "text", text: "?" }, image] }] });
    assert.ok(sawImage(response.choices[0].message.content));
  },
  async embedding() {
    const response = await client.embeddings.create({ model: MODEL, input: ["hello"] });
    assert.deepEqual(response.data[0].embedding, EMBEDDED);
  },
  async extension() {
    const response = await create({ logprobs: true, n: 2, beams: 4 });
    assert.ok(response.choices[1].logprobs.content.length > 0);
  },
  async "wrong key"() {
    const stranger = client.withOptions({ apiKey: WRONG_KEY });
    const request = stranger.chat.completions.create({ model: MODEL, messages: HELLO });
    await assert.rejects(request, OpenAI.AuthenticationError);
  },
});
