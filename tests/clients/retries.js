// Clients with the retries that they have by default: `retries.js NAME` sends one chat, and prints the text of the answer.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import OpenAI from "openai";
import { API, KEY, MODEL } from "./features.js";

const CLIENTS = {
  async openai() {
    const client = new OpenAI({ baseURL: API, apiKey: KEY });
    const messages = [{ role: "user", content: "hello" }];
    return (await client.chat.completions.create({ model: MODEL, messages })).choices[0].message.content;
  },
  async ai() {
    const provider = createOpenAICompatible({ name: "tierlane", baseURL: API, apiKey: KEY });
    return (await generateText({ model: provider(MODEL), prompt: "hello" })).text;
  },
};

console.log(await CLIENTS[process.argv[2]]());
