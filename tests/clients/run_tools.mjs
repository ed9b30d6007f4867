// openai's npm package: runTools, which calls a function and hands the result back.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
let asked = null;
const parameters = {
  type: "object", properties: { city: { enum: ["Rome", "Bern"] } }, required: ["city"], additionalProperties: false,
};
const runner = client.chat.completions.runTools({
  model, messages: [{ role: "user", content: "What is the weather in Rome?" }], temperature: 0, max_tokens: 60,
  tool_choice: { type: "function", function: { name: "weather" } },
  tools: [{ type: "function", function: {
    name: "weather", parameters, parse: JSON.parse, function: given => { asked = given; return "sunny"; } } }],
}, { maxChatCompletions: 2 });
await runner.done();
if (!["Rome", "Bern"].includes(asked?.city)) throw new Error(`the function was called with ${JSON.stringify(asked)}`);
console.log(JSON.stringify(asked));
