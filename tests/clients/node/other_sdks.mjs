// Cases of the AI SDK and of Anthropic's client for Node.js. `node other_sdks.mjs ADDRESS CASE` runs one; without a case it prints their names.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [address, chosen] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "trireme", baseURL: `http://${address}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true });
const anthropic = new Anthropic({ baseURL: `http://${address}`, apiKey: "none", maxRetries: 0 });
const question = "What is the opposite of hot?";
const answer = " The opposite of hot is cold.";
const schema = z.object({ city: z.string().max(10), days: z.number().int().min(1).max(9) });
const common = { model: provider("ensemble"), prompt: question, temperature: 0, maxOutputTokens: 900, maxRetries: 0 };
const message = { model: "ensemble", max_tokens: 300, temperature: 0, messages: [{ role: "user", content: question }] };

const cases = {
  async ai_text_and_its_stream() {
    const found = await generateText(common);
    assert.equal(found.text, answer);
    assert.equal(found.finishReason, "stop");
    const stream = streamText(common);
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, answer);
    assert.equal((await stream.usage).outputTokens, found.usage.outputTokens);
  },

  async ai_objects() {
    const { object } = await generateObject({ ...common, schema });
    const stream = streamObject({ ...common, schema });
    let parts = 0;
    for await (const _ of stream.partialObjectStream) parts += 1;
    assert.ok(parts > 1);
    assert.deepEqual(await stream.object, object);
  },

  async ai_tools() {
    const run = { ...common, tools: { weather: tool({ description: "The weather.", inputSchema: schema, execute: async () => "4 degrees" }) } };
    const { toolCalls, toolResults } = await generateText({ ...run, toolChoice: "required" });
    assert.ok(toolCalls.length > 0 && toolResults.length === toolCalls.length);
    for (const call of toolCalls) schema.parse(call.input);
    const stream = streamText({ ...run, toolChoice: { type: "tool", toolName: "weather" } });
    for await (const part of stream.fullStream) assert.notEqual(part.type, "error");
    const calls = await stream.toolCalls;
    assert.equal(calls.length, 1);
    schema.parse(calls[0].input);
  },

  async ai_errors() {
    const wrong = generateText({ ...common, model: provider("nobody") });
    await assert.rejects(wrong, (error) => error.statusCode === 404 && error.message.includes("nobody") && !error.isRetryable);
  },

  async anthropic_message_and_its_stream() {
    const found = await anthropic.messages.create(message);
    assert.deepEqual([found.content.length, found.content[0].text, found.stop_reason], [1, answer, "end_turn"]);
    let text = "";
    const stream = anthropic.messages.stream(message).on("text", (delta) => (text += delta));
    assert.equal((await stream.finalMessage()).content[0].text, answer);
    assert.equal(text, answer);
    const counted = await anthropic.messages.countTokens({ model: message.model, messages: message.messages });
    assert.equal(counted.input_tokens, found.usage.input_tokens + (found.usage.cache_read_input_tokens ?? 0));
  },

  async anthropic_tool_use() {
    const input_schema = { type: "object", properties: { city: { type: "string", maxLength: 10 } }, required: ["city"], additionalProperties: false };
    const fields = { ...message, tools: [{ name: "weather", input_schema }], tool_choice: { type: "tool", name: "weather" } };
    const found = await anthropic.messages.create(fields);
    const use = found.content.find((block) => block.type === "tool_use");
    assert.equal(found.stop_reason, "tool_use");
    assert.deepEqual(Object.keys(use.input), ["city"]);
    const streamed = await anthropic.messages.stream(fields).finalMessage();
    assert.deepEqual(streamed.content.find((block) => block.type === "tool_use").input, use.input);
    const result = [{ type: "tool_result", tool_use_id: use.id, content: "4" }];
    const history = [...message.messages, { role: "assistant", content: found.content }, { role: "user", content: result }];
    assert.ok((await anthropic.messages.create({ ...fields, tool_choice: { type: "auto" }, messages: history, max_tokens: 8 })).stop_reason);
  },

  async anthropic_errors() {
    await assert.rejects(anthropic.messages.create({ ...message, model: "nobody" }), Anthropic.NotFoundError);
    await assert.rejects(anthropic.messages.create({ ...message, temprature: 1 }), Anthropic.BadRequestError);
  },
};

if (chosen === undefined) console.log(Object.keys(cases).join("\n"));
else await cases[chosen]();
