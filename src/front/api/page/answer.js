// One answer of the playground: text, reasoning, tool calls, tokens with their probabilities, and timing.

import { codeBlock, el, setText } from "./dom.js";
import { duration, number } from "./figures.js";

/** Lower bounds of the probability of a token for the classes `p0`, the likeliest, to `p4`. */
const LEVELS = [0.9, 0.6, 0.3, 0.1, 0];

/** A new answer. `sendResults` gets the results of its tool calls. */
export function newAnswer(model, sendResults) {
  const parts = {
    reasoning: el("p", { class: "text" }),
    text: el("p", { class: "text waiting" }),
    tokens: el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the answer; the arrow keys choose one", hidden: true }),
    detail: el("div", { class: "detail", "aria-live": "polite", hidden: true }),
    tools: el("div", { class: "calls" }),
    timing: el("p", { class: "timing muted small" }),
    more: el("div", { class: "more" }),
  };
  const thinking = el("details", { class: "reasoning", open: true, hidden: true }, el("summary", {}, "Reasoning"), parts.reasoning);
  const root = el("article", { class: "message assistant" }, el("p", { class: "who" }, model), thinking, parts.text, parts.tokens, parts.detail, parts.tools, parts.timing, parts.more);
  const state = { content: "", reasoning: "", calls: [], entries: [], usage: null, finish: null, sent: null, first: null, last: null, numEvents: 0, chosen: -1 };
  connectTokens(parts, state);
  return {
    root,
    begin: (body) => begin(parts, state, body),
    add: (event) => add(parts, thinking, state, event),
    end: (finish, error) => end(parts, state, finish, error, sendResults),
    message: () => message(state),
  };
}

function begin(parts, state, body) {
  state.sent = performance.now();
  state.isStream = Boolean(body.stream);
  const request = el("details", {}, el("summary", {}, "Request"), codeBlock(JSON.stringify(body, null, 2), "request"));
  parts.more.append(request);
}

/** Takes a chunk of a stream, or a whole answer in the same form. */
function add(parts, thinking, state, event) {
  if (event.usage) state.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls?.length) {
    state.last = performance.now();
    state.first ??= state.last;
    state.numEvents += 1;
    parts.text.classList.remove("waiting");
  }
  if (reasoning) {
    state.reasoning += reasoning;
    thinking.hidden = false;
    parts.reasoning.append(reasoning);
  }
  if (content) {
    state.content += content;
    parts.text.append(content);
  }
  (calls ?? []).forEach((call) => addCall(parts, state, call));
  addTokens(parts, state, choice.logprobs?.content ?? []);
  if (choice.finish_reason) state.finish = choice.finish_reason;
  showTiming(parts, state);
}

function addCall(parts, state, delta) {
  const at = delta.index ?? 0;
  if (!state.calls[at]) {
    const shown = { name: el("strong", {}), text: el("code", {}) };
    state.calls[at] = { id: "", name: "", text: "", shown };
    parts.tools.append(el("div", { class: "call" }, el("p", {}, "Calls ", shown.name), el("pre", {}, shown.text)));
  }
  const call = state.calls[at];
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.name += delta.function.name;
  call.text += delta.function?.arguments ?? "";
  setText(call.shown.name, call.name);
  setText(call.shown.text, call.text);
}

/** Tokens with log-probabilities replace the plain text. */
function addTokens(parts, state, entries) {
  if (!entries.length) return;
  parts.tokens.hidden = false;
  parts.text.hidden = true;
  for (const entry of entries) {
    const level = LEVELS.findIndex((bound) => Math.exp(entry.logprob) >= bound);
    const token = el("span", { class: `token p${level}`, title: describe(entry) }, entry.token);
    token.dataset.at = state.entries.push(entry) - 1;
    parts.tokens.append(token);
  }
}

const probability = (logprob) => `${number(100 * Math.exp(logprob))} %`;
const describe = (entry) => `${JSON.stringify(entry.token)}: ${probability(entry.logprob)}, log-probability ${entry.logprob.toFixed(3)}`;

/** Pointer and arrow keys choose a token, whose alternatives are then shown. */
function connectTokens(parts, state) {
  parts.tokens.addEventListener("click", ({ target }) => target.dataset.at !== undefined && choose(parts, state, Number(target.dataset.at)));
  parts.tokens.addEventListener("keydown", (event) => {
    const last = state.entries.length - 1;
    const next = { ArrowRight: state.chosen + 1, ArrowLeft: state.chosen - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(parts, state, Math.min(Math.max(next, 0), last));
  });
}

function choose(parts, state, at) {
  parts.tokens.children[state.chosen]?.classList.remove("chosen");
  state.chosen = at;
  parts.tokens.children[at].classList.add("chosen");
  const entry = state.entries[at];
  const others = entry.top_logprobs ?? [];
  const row = (one) => {
    const bar = el("span", { class: "share" });
    bar.style.width = `${100 * Math.exp(one.logprob)}%`;
    const isChosen = one.token === entry.token;
    return el("li", { class: isChosen ? "chosen" : undefined }, el("code", {}, JSON.stringify(one.token)), el("span", { class: "track" }, bar), el("span", { class: "number" }, probability(one.logprob)));
  };
  parts.detail.hidden = false;
  parts.detail.replaceChildren(el("p", { class: "small" }, `Token ${at + 1} of ${state.entries.length}: `, el("code", {}, JSON.stringify(entry.token)), `, log-probability ${entry.logprob.toFixed(3)}`),
    el("ol", { class: "alternatives", "aria-label": "Likeliest tokens" }, ...others.map(row)));
}

/** Times are those of this browser: from the request to the first text, and from the first text to the last. */
function showTiming(parts, state, isDone = false, finish = state.finish) {
  const numTokens = state.usage?.completion_tokens ?? (state.entries.length || state.numEvents);
  const seconds = (state.last - state.first) / 1000;
  const facts = [];
  if (state.first !== null && state.isStream) facts.push(`first token ${duration((state.first - state.sent) / 1000)}`);
  facts.push(`${number(numTokens)} token${numTokens === 1 ? "" : "s"}`);
  if (state.isStream && numTokens > 1 && seconds > 0) facts.push(`${number((numTokens - 1) / seconds)} tokens/s`);
  if (isDone) {
    facts.push(`${duration((performance.now() - state.sent) / 1000)} in all`);
    if (state.usage) facts.push(`prompt ${number(state.usage.prompt_tokens)}, of these ${number(state.usage.prompt_tokens_details?.cached_tokens ?? 0)} cached`);
    if (finish) facts.push(`end: ${finish}`);
  }
  setText(parts.timing, facts.join(" · "));
}

function end(parts, state, finish, error, sendResults) {
  parts.text.classList.remove("waiting");
  if (error) parts.more.prepend(el("p", { class: "note", role: "alert" }, error.message));
  if (state.sent !== null && (state.last !== null || !error)) showTiming(parts, state, true, finish ?? state.finish);
  if (state.calls.length && !finish && !error) parts.tools.append(resultForm(state, sendResults));
  if (state.entries.length) parts.more.prepend(viewButton(parts));
  if (!state.content && !state.calls.length && !state.reasoning && !error) parts.text.append("(no text)");
}

/** Switches between plain text and tokens. */
function viewButton(parts) {
  const button = el("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Plain text");
  button.addEventListener("click", () => {
    const isPlain = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isPlain));
    parts.text.hidden = !isPlain;
    parts.tokens.hidden = isPlain;
    if (isPlain) parts.detail.hidden = true;
  });
  return button;
}

function resultForm(state, sendResults) {
  const inputs = state.calls.map((call) => ({ id: call.id, input: el("textarea", { rows: 2, class: "code", required: true }), name: call.name }));
  const button = el("button", { type: "submit" }, "Send results");
  const form = el("form", { class: "fields" }, ...inputs.map(({ input, name }) => el("label", { class: "wide" }, `Result of ${name}`, input)), button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.remove();
    sendResults(inputs.map(({ id, input }) => ({ id, content: input.value })));
  });
  return form;
}

/** The answer as a message of the next request; null if there is nothing. */
function message({ content, calls }) {
  if (!content && !calls.length) return null;
  const asked = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: content || null, ...(asked.length ? { tool_calls: asked } : {}) };
}
