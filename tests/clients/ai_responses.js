// Vercel's `ai` with its provider for OpenAI, on /v1/responses.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";
import { features } from "./ai_features.js";
import { API, KEY, MODEL, WRONG_KEY, report } from "./features.js";

const provider = createOpenAI({ baseURL: API, apiKey: KEY });
const stranger = createOpenAI({ baseURL: API, apiKey: WRONG_KEY });

await report({
  ...features(provider(MODEL), stranger(MODEL)),
  async stored() {
    const model = provider(MODEL);
    const first = await generateText({ model, prompt: "hello", maxRetries: 0 });
    const previousResponseId = first.finalStep.providerMetadata.openai.responseId;
    const providerOptions = { openai: { previousResponseId } };
    assert.equal((await generateText({ model, prompt: "you", providerOptions, maxRetries: 0 })).text, "uoy");
  },
});
