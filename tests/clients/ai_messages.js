// Vercel's `ai` with its provider for Anthropic, on /v1/messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { WEATHER, features } from "./ai_features.js";
import { API, KEY, MODEL, WRONG_KEY, report } from "./features.js";

const provider = createAnthropic({ baseURL: API, apiKey: KEY });
const stranger = createAnthropic({ baseURL: API, apiKey: WRONG_KEY });

// Of a model that it does not know, it requests structured output as the call of a tool.
await report(features(provider(MODEL), stranger(MODEL), WEATHER));
