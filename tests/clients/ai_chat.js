// Vercel's `ai` with its provider for OpenAI-compatible servers, on /v1/chat/completions and /v1/embeddings.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText } from "ai";
import { features } from "./ai_features.js";
import { API, EMBEDDED, KEY, MODEL, WRONG_KEY, report } from "./features.js";

const options = { name: "tierlane", baseURL: API, supportsStructuredOutputs: true };
const provider = createOpenAICompatible({ ...options, apiKey: KEY });
const stranger = createOpenAICompatible({ ...options, apiKey: WRONG_KEY });

await report({
  ...features(provider(MODEL), stranger(MODEL)),
  async embedding() {
    const { embedding } = await embed({ model: provider.embeddingModel(MODEL), value: "hello" });
    assert.deepEqual(embedding, EMBEDDED);
  },
  async extension() {
    const providerOptions = { tierlane: { beams: 4 } };
    const result = await generateText({ model: provider(MODEL), prompt: "hello", providerOptions, maxRetries: 0 });
    assert.notEqual(result.text, "olleh"); // The stand-in's text depends on the field.
  },
});
