// Cases of OpenAI's client for Node.js. `node openai.mjs ADDRESS CASE` runs one; without a case it prints their names.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [address, chosen] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 });
const model = "ensemble";
const question = "What is the opposite of hot?";
const answer = " The opposite of hot is cold.";
const messages = [{ role: "user", content: question }];
const weather = {
  type: "object",
  properties: { city: { type: "string", maxLength: 10 }, unit: { enum: ["celsius", "fahrenheit"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "unit", "days"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", description: "The weather.", parameters: weather, strict: true } };
const common = { model, messages, max_tokens: 400, temperature: 0 };

function checkWeather(found) {
  assert.deepEqual(Object.keys(found).sort(), ["city", "days", "unit"]);
  assert.equal(typeof found.city, "string");
  assert.ok(weather.properties.unit.enum.includes(found.unit) && found.days >= 1 && found.days <= 9);
}

const cases = {
  async models() {
    const found = [];
    for await (const one of client.models.list()) found.push(one.id);
    assert.deepEqual(found, [model]);
  },

  async chat_and_its_stream() {
    const { choices, usage } = await client.chat.completions.create(common);
    assert.equal(choices[0].message.content, answer);
    assert.equal(choices[0].finish_reason, "stop");
    const stream = client.chat.completions.stream({ ...common, stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    assert.equal(await stream.finalContent(), answer);
    assert.equal(text, answer);
    assert.equal((await stream.totalUsage()).completion_tokens, usage.completion_tokens);
  },

  async a_stream_ends_when_it_is_aborted() {
    const stream = await client.chat.completions.create({ ...common, max_tokens: 1500, stream: true, ignore_eos: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
    assert.ok(chunks < 1400); // Chunks that had arrived already are still delivered.
    assert.equal((await client.chat.completions.create(common)).choices[0].message.content, answer);
  },

  async tool_calls() {
    const { choices } = await client.chat.completions.create({ ...common, tools: [tool], tool_choice: "required" });
    assert.equal(choices[0].finish_reason, "tool_calls");
    for (const call of choices[0].message.tool_calls) checkWeather(JSON.parse(call.function.arguments));
    const results = choices[0].message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "4" }));
    const history = [...messages, choices[0].message, ...results, { role: "user", content: "Thanks." }];
    assert.ok((await client.chat.completions.create({ ...common, messages: history, tools: [tool], max_tokens: 8 })).choices[0].finish_reason);
  },

  async a_streamed_tool_call() {
    const stream = client.chat.completions.stream({ ...common, tools: [tool], tool_choice: { type: "function", function: { name: "get_weather" } } });
    const message = await stream.finalMessage();
    assert.equal(message.tool_calls.length, 1);
    checkWeather(JSON.parse(message.tool_calls[0].function.arguments));
  },

  async run_tools() {
    const calls = [];
    const run = { ...tool.function, parse: JSON.parse, function: (found) => { calls.push(found); return "4 degrees"; } };
    const runner = client.chat.completions.runTools({ ...common, tools: [{ type: "function", function: run }], tool_choice: { type: "function", function: { name: "get_weather" } } });
    await runner.done();
    assert.equal(calls.length, 1);
    checkWeather(calls[0]);
  },

  async structured_output() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: weather } };
    const { choices } = await client.chat.completions.parse({ ...common, response_format });
    checkWeather(choices[0].message.parsed);
  },

  async log_probabilities() {
    const { choices } = await client.chat.completions.create({ ...common, logprobs: true, top_logprobs: 2 });
    const entries = choices[0].logprobs.content;
    assert.equal(entries.map((entry) => entry.token).join(""), answer);
    for (const entry of entries) assert.deepEqual(Buffer.from(entry.bytes).toString(), entry.token);
  },

  async completions() {
    const prompt = `Q: ${question}\nA:`;
    const { choices } = await client.completions.create({ model, prompt, max_tokens: 32, temperature: 0, echo: true, logprobs: 1 });
    assert.equal(choices[0].text, prompt + answer);
    assert.equal(choices[0].logprobs.token_logprobs[0], null);
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt, max_tokens: 32, temperature: 0, stream: true })) text += chunk.choices[0]?.text ?? "";
    assert.equal(text, answer);
  },

  async responses() {
    const fields = { model, input: question, max_output_tokens: 400, temperature: 0 };
    const found = await client.responses.create(fields);
    assert.equal(found.status, "completed");
    assert.equal(found.output_text, answer);
    let text = "";
    const stream = client.responses.stream(fields).on("response.output_text.delta", (event) => (text += event.delta));
    assert.equal((await stream.finalResponse()).output_text, answer);
    assert.equal(text, answer);
    const tools = [{ type: "function", name: "get_weather", parameters: weather, strict: true }];
    const called = await client.responses.create({ ...fields, tools, tool_choice: "required" });
    checkWeather(JSON.parse(called.output.find((item) => item.type === "function_call").arguments));
    const parsed = await client.responses.parse({ ...fields, text: { format: { type: "json_schema", name: "weather", schema: weather, strict: true } } });
    checkWeather(parsed.output_parsed);
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ ...common, model: "nobody" }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ ...common, temprature: 1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temprature");
    await assert.rejects(client.chat.completions.create({ ...common, temperature: -1, stream: true }), OpenAI.BadRequestError);
  },
};

if (chosen === undefined) console.log(Object.keys(cases).join("\n"));
else await cases[chosen]();
