// The parts that all JavaScript clients of this folder share: the address, the inputs, and the report that the test reads.

export const API = `${process.env.CLIENT_URL}/v1`;
export const KEY = process.env.CLIENT_KEY;
export const WRONG_KEY = "tl_of_nobody";
export const MODEL = "openai";
export const EMBEDDED = [5, 1]; // The stand-in's vector of a text with five characters.
export const PNG =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

// Runs all features, and prints a line of JSON: the error of each feature, or "".
export async function report(features) {
  const results = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      await feature();
      results[name] = "";
    } catch (error) {
      results[name] = `${error?.stack ?? error}`;
    }
  }
  process.stdout.write(`${JSON.stringify(results)}\n`);
}

export async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

// The stand-in's text is its input, reversed.
export const sawImage = (text) => text.includes([...PNG].reverse().join(""));
