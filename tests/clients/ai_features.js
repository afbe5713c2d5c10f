// What each provider of Vercel's `ai` is tried with.

import assert from "node:assert/strict";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, PNG, collected, sawImage } from "./features.js";

export const WEATHER = z.object({ q: z.string(), at: z.number() });
const ANSWER = z.object({ answer: z.string() });
const weather = tool({ description: "The weather.", inputSchema: WEATHER, execute: async () => "21 °C" });

// `strange` is the model with a key of nobody. The stand-in's structured output depends on how the provider requests it.
export const features = (model, strange, schema = ANSWER) => ({
  async text() {
    const result = await generateText({ model, prompt: "hello", maxRetries: 0 });
    assert.equal(result.text, "olleh");
    assert.ok(result.usage.totalTokens > 0);
  },
  async stream() {
    const result = streamText({ model, prompt: "hello", maxRetries: 0 });
    assert.equal((await collected(result.textStream)).join(""), "olleh");
  },
  async tools() {
    // The tool runs, and its result is sent back in the second step.
    const result = await generateText({
      model,
      prompt: "hello",
      tools: { weather },
      stopWhen: isStepCount(2),
      maxRetries: 0,
    });
    assert.equal(result.steps.length, 2);
    assert.equal(result.steps[0].toolResults[0].output, "21 °C");
    WEATHER.parse(result.steps[0].toolCalls[0].input);
  },
  async "streamed tools"() {
    const result = streamText({ model, prompt: "hello", tools: { weather }, maxRetries: 0 });
    const parts = await collected(result.fullStream);
    assert.ok(parts.filter((part) => part.type === "tool-input-delta").length > 1);
    WEATHER.parse((await result.toolCalls)[0].input);
  },
  async "structured output"() {
    const output = Output.object({ schema });
    schema.parse((await generateText({ model, prompt: "hello", output, maxRetries: 0 })).output);
  },
  async image() {
    const content = [
      { type: "text", text: "What is this?" },
      { type: "file", data: PNG, mediaType: "image/png" },
    ];
    const result = await generateText({ model, messages: [{ role: "user", content }], maxRetries: 0 });
    assert.ok(sawImage(result.text));
  },
  async "wrong key"() {
    const request = generateText({ model: strange, prompt: "hello", maxRetries: 0 });
    await assert.rejects(request, (error) => APICallError.isInstance(error) && error.statusCode === 401);
  },
});
