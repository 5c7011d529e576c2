// The playground: a conversation over /v1/chat/completions, with every setting that a request may have here.

import { newAnswer } from "./answer.js";
import { byId, el } from "./dom.js";
import { call, events } from "./http.js";

/** Sampling settings: the field of the request, its label, and attributes of the input. */
const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["max_tokens", "Maximum tokens", { min: 1, step: 1, value: 256 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "Seed", { step: 1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.05, max: 10, step: 0.05 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
];
const NUM_ALTERNATIVES = 5;
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 30 } },
  required: ["name", "age"],
};
const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

let messages = [];
let running = null;

/** Builds the settings and connects the buttons. */
export function startPlayground() {
  byId("sampling").replaceChildren(...SAMPLING.map(([name, label, attributes]) =>
    el("label", {}, label, el("input", { id: `set-${name}`, type: "number", inputmode: "decimal", placeholder: "default", ...attributes }))),
    el("label", { class: "wide" }, "Stop, one text a line", el("textarea", { id: "set-stop", rows: 1, placeholder: "none" })));
  byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  byId("form").addEventListener("change", () => (byId("schema-field").hidden = byId("form").value !== "json_schema"));
  byId("example-tool").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(EXAMPLE_TOOL, null, 2);
    showToolChoice();
  });
  for (const event of ["input", "change"]) byId("tools").addEventListener(event, showToolChoice);
  showToolChoice();
  byId("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("chat").requestSubmit();
  });
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("message").value;
    if (running || !text.trim()) return;
    byId("message").value = "";
    say({ role: "user", content: text });
    answer();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  if (matchMedia("(max-width: 800px)").matches) byId("settings").open = false;
}

function clear() {
  running?.abort();
  messages = [];
  byId("conversation").replaceChildren(byId("no-messages") ?? el("p", { id: "no-messages", class: "muted empty" }, "Send a message to start."));
}

/** The values of `tool_choice` for the tools that are entered: one for each tool, besides the three that have no name. */
function showToolChoice() {
  const choice = byId("tool-choice");
  const chosen = choice.value;
  let names = [];
  try {
    names = JSON.parse(byId("tools").value).map((tool) => tool.function.name);
  } catch {
    // The request will say what is wrong with the list.
  }
  const words = [["auto", "as the model decides"], ["none", "none"], ["required", "one at least"], ...names.map((name) => [`call ${name}`, `only ${name}`])];
  choice.replaceChildren(...words.map(([value, label]) => el("option", { value }, label)));
  choice.value = words.some(([value]) => value === chosen) ? chosen : "auto";
  byId("tool-choice-field").hidden = !byId("tools").value.trim();
}

/** `tool_choice` of the request, or undefined for the default. */
function toolChoice() {
  const value = byId("tool-choice").value;
  if (value === "auto") return undefined;
  return value.startsWith("call ") ? { type: "function", function: { name: value.slice("call ".length) } } : value;
}

/** Adds a message of the user or of a tool. */
function say(message) {
  messages.push(message);
  byId("no-messages")?.remove();
  const who = message.role === "tool" ? "Result of a tool" : "You";
  show(el("article", { class: `message ${message.role}` }, el("p", { class: "who" }, who), el("p", { class: "text" }, message.content)));
}

/** Adds an element at the end and scrolls to it, if the end was visible. */
function show(element) {
  const box = byId("conversation");
  box.append(element);
  box.scrollTop = box.scrollHeight;
}

/** The request for the next answer. Throws an `Error` that names the setting that is wrong. */
function request() {
  const system = byId("system").value.trim();
  const body = { model: byId("model").value, messages: system ? [{ role: "system", content: system }, ...messages] : [...messages] };
  for (const [name, label] of SAMPLING) {
    const input = byId(`set-${name}`);
    if (!input.validity.valid && !input.validity.stepMismatch) throw new Error(`${label}: ${input.validationMessage}`);
    if (input.value !== "") body[name] = Number(input.value);
  }
  const stop = byId("set-stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  const form = byId("form").value;
  if (form === "json_object") body.response_format = { type: form };
  if (form === "json_schema") body.response_format = { type: form, json_schema: { name: "answer", schema: parsed("schema", "Schema") } };
  if (byId("tools").value.trim()) {
    body.tools = parsed("tools", "Tools");
    const choice = toolChoice();
    if (choice !== undefined) body.tool_choice = choice;
  }
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (byId("stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
  return body;
}

function parsed(id, name) {
  try {
    return JSON.parse(byId(id).value);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

/** Requests an answer and shows it while it arrives. */
async function answer() {
  const shown = newAnswer(byId("model").value, sendResults);
  show(shown.root);
  setRunning(new AbortController());
  try {
    const body = request();
    shown.begin(body);
    const response = await call("v1/chat/completions", { body, signal: running.signal });
    if (body.stream) {
      for await (const event of events(response)) await apply(shown, event);
    } else {
      await apply(shown, whole(await response.json()));
    }
    shown.end();
  } catch (error) {
    shown.end(error.name === "AbortError" ? "stopped" : null, error.name === "AbortError" ? null : error);
  }
  const message = shown.message();
  // An answer without content would be refused in the next request, and so would a message without its answer.
  if (message) messages.push(message);
  else while (messages.length && messages.at(-1).role !== "assistant") messages.pop();
  setRunning(null);
}

/** Shows an event of a stream, and keeps the end of the conversation in view. */
async function apply(shown, event) {
  if (event.error) throw new Error(event.error.message ?? String(event.error));
  const box = byId("conversation");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  shown.add(event);
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

/** A whole answer in the form of a stream's event. */
function whole(body) {
  const choices = body.choices.map((choice) => ({ ...choice, delta: { ...choice.message, tool_calls: choice.message.tool_calls?.map((one, index) => ({ ...one, index })) } }));
  return { ...body, choices };
}

/** Sends the results of tool calls, and requests the next answer. */
function sendResults(results) {
  if (running) return;
  results.forEach(({ id, content }) => say({ role: "tool", tool_call_id: id, content }));
  answer();
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = Boolean(controller);
  byId("stop").hidden = !controller;
  byId("conversation").setAttribute("aria-busy", String(Boolean(controller)));
}
