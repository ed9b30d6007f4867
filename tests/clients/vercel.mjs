// Vercel's AI SDK by both of its providers: a tool and its result, a stream, an object by a schema.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const models = [
  createOpenAI({ baseURL, apiKey: "none" })(name),
  createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true })(name),
];
const prompt = "What is the weather in Rome?";
const must = (right, what) => { if (!right) throw new Error(what); };
for (const model of models) {
  const common = { model, maxOutputTokens: 60, temperature: 0, maxRetries: 0 };
  let asked = null;
  const inputSchema = z.object({ city: z.enum(["Rome", "Bern"]) });
  const tools = { weather: tool({ inputSchema, execute: given => { asked = given; return "sunny"; } }) };
  const called = await generateText({ ...common, prompt, tools, toolChoice: "required", stopWhen: stepCountIs(1) });
  must(["Rome", "Bern"].includes(asked?.city), `the tool was called with ${JSON.stringify(asked)}`);
  const messages = [{ role: "user", content: prompt }, ...called.response.messages];
  must((await generateText({ ...common, messages, tools })).finishReason, "no answer to a result");
  let text = "";
  for await (const piece of streamText({ ...common, prompt }).textStream) text += piece;
  must(text, "an empty stream");
  const output = Output.object({ schema: z.object({ city: z.string() }) });
  must(typeof (await generateText({ ...common, prompt: "Rome", output })).output.city === "string", "no object");
}
