// The status: reads `ui/status.json` each second and shows models, workers, faults and the machine.

import { byId, el, fillFacts, fillTable, setText } from "./dom.js";
import { bytes, duration, mean, number, observed, percent, quantile, rate, samples, sum } from "./figures.js";
import { ApiError, askAgain, call } from "./http.js";

const INTERVAL_MS = 1000;
/** Snapshots that are kept: latencies are those of the last minute. */
const KEPT = 61;
/** Rates are those between the last snapshot and the one before the last but this number. */
const RATE_STEPS = 2;
const SERIES = [
  { title: "Tokens/s", name: "trireme_llm_output_tokens_total" },
  { title: "Steps/s", name: "trireme_llm_steps_total" },
];

const history = [];
const cards = new Map();
let timer = null;

/** Reads the status until the page is closed; pauses while it is not visible. */
export function start() {
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && poll());
  poll();
}

/** Reads the status now. */
export async function poll() {
  clearTimeout(timer);
  timer = null;
  try {
    const status = await (await call("ui/status.json")).json();
    history.push({ at: performance.now(), ...status });
    history.splice(0, history.length - KEPT);
    show(status);
  } catch (error) {
    showError(error);
  }
  if (document.visibilityState === "visible" && timer === null) timer = setTimeout(poll, INTERVAL_MS);
}

function showError(error) {
  const isDenied = error instanceof ApiError && error.header;
  setState(isDenied ? "key needed" : "unreachable", isDenied ? "warn" : "bad");
  const retry = el("button", { type: "button", onclick: () => (askAgain(), poll()) }, isDenied ? "Enter the key" : "Try again");
  note(isDenied ? "The status needs an API key. " : `The server does not answer: ${error.message}. `, retry);
}

function note(text, ...others) {
  const box = byId("status-note");
  if (box.firstChild?.textContent === text) return;
  box.replaceChildren(...(text ? [text, ...others] : []));
  box.hidden = !text;
}

function setState(text, kind) {
  const pill = byId("state");
  setText(pill, text);
  pill.className = `pill ${kind}`;
}

function show({ server, models, metrics }) {
  if (server.is_draining) setState("draining", "warn");
  else setState(server.is_ready ? "ready" : "not ready", server.is_ready ? "good" : "warn");
  note(metrics ? "" : "The metrics service is off or has another address than HTTP, so their figures are not shown here.");
  const hosts = new Set(server.ranks).size;
  const ranks = server.ranks.length ? `, ${plural(server.ranks.length, "rank")} on ${plural(hosts, "node")}` : "";
  setText(byId("status-line"), `Server “${server.name}”, version ${server.version}${ranks}`);
  showLanguageModels(metrics);
  showFaults(server, metrics);
  showMachine(metrics);
  showWorkers(server, metrics);
  const row = (model) => [model.name, model.version || "–", pill(model.state.toLowerCase(), model.state === "READY"), model.reason || "–"];
  fillTable(byId("models"), ["Model", "Version", "State", "Reason"], models.map(row));
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const pill = (text, isGood) => el("span", { class: `pill ${isGood ? "good" : "warn"}` }, text);

function showLanguageModels(metrics) {
  const names = [...new Set(samples(metrics, "trireme_llm_ready").map((sample) => sample.labels.model))];
  for (const [name, card] of cards) {
    if (!names.includes(name)) {
      card.root.remove();
      cards.delete(name);
    }
  }
  for (const name of names) {
    if (!cards.has(name)) {
      cards.set(name, newCard(name));
      byId("language-models").append(cards.get(name).root);
    }
    updateCard(cards.get(name), name);
  }
}

/** The card of a language model, with the elements that change. */
function newCard(name) {
  const tiles = new Map();
  const tile = (title, hint) => {
    const value = el("dd", {});
    const below = el("dd", { class: "muted small" });
    tiles.set(title, { value, below });
    return el("div", { class: "tile", title: hint }, el("dt", {}, title), value, below);
  };
  const state = el("span", { class: "pill" });
  const charts = SERIES.map(({ title }) => newChart(title));
  const list = el(
    "dl", { class: "tiles" },
    tile("Tokens/s", "Generated tokens per second, over the last two seconds"),
    tile("Running", "Sequences in the current steps"),
    tile("Queue", "Sequences that wait"),
    tile("KV blocks", "Share of the KV blocks that running sequences use"),
    tile("First token", "Time to first token, median of the last minute"),
    tile("Between tokens", "Inter-token latency, median of the last minute"),
    tile("Step", "Mean time of a step over the last minute"),
    tile("Prompt tokens/s", "Accepted prompt tokens per second"),
  );
  const kv = newBar();
  const title = el("h2", {}, name, " ", state);
  const root = el("section", { class: "card model", "aria-label": `Language model ${name}` }, title, list, kv.root, el("div", { class: "charts" }, ...charts.map((chart) => chart.root)));
  return { root, tiles, state, charts, kv };
}

function updateCard(card, model) {
  const now = history[history.length - 1];
  const recent = history[Math.max(0, history.length - 1 - RATE_STEPS)];
  const oldest = history[0];
  const value = (name) => sum(now.metrics, name, model);
  const set = (title, text, below = "") => {
    setText(card.tiles.get(title).value, text);
    setText(card.tiles.get(title).below, below);
  };
  const isReady = samples(now.metrics, "trireme_llm_ready", model).every((sample) => sample.value > 0);
  setText(card.state, isReady ? "ready" : "not ready");
  card.state.className = `pill ${isReady ? "good" : "warn"}`;
  const blocks = { all: value("trireme_llm_kv_blocks"), used: value("trireme_llm_kv_blocks_used"), cached: value("trireme_llm_kv_blocks_cached") };
  const [first, between] = ["time_to_first_token", "inter_token_latency"].map((name) => observed(oldest, now, `trireme_llm_${name}_seconds`, model));
  const step = observed(oldest, now, "trireme_llm_step_seconds", model);
  const p99 = (histogram) => (histogram ? `p99 ${duration(quantile(histogram, 0.99))}` : "none in the last minute");
  const waiting = value("trireme_llm_requests_waiting") + (value("trireme_llm_requests_queued") ?? 0);
  set("Tokens/s", number(rate(recent, now, "trireme_llm_output_tokens_total", model)), `${number(value("trireme_llm_output_tokens_total"))} in all`);
  set("Running", number(value("trireme_llm_requests_running")), `at most ${number(value("trireme_llm_requests_max"))}`);
  set("Queue", number(waiting), `${number(value("trireme_llm_preemptions_total"))} preemptions`);
  set("KV blocks", percent(blocks.used / Math.max(blocks.all, 1)), `of ${number(blocks.all)} × ${number(perBlock(now, model))} tokens`);
  set("First token", duration(quantile(first, 0.5)), p99(first));
  set("Between tokens", duration(quantile(between, 0.5)), p99(between));
  set("Step", duration(mean(step)), `${number(rate(recent, now, "trireme_llm_steps_total", model))} steps/s`);
  set("Prompt tokens/s", number(rate(recent, now, "trireme_llm_prompt_tokens_total", model)), prefixHits(now, model));
  updateBar(card.kv, blocks);
  SERIES.forEach(({ name }, at) => updateChart(card.charts[at], series(name, model)));
}

const perBlock = (now, model) => samples(now.metrics, "trireme_llm_kv_block_tokens", model)[0]?.value ?? null;

function prefixHits(now, model) {
  const [lookups, hits] = ["lookups", "hits"].map((name) => sum(now.metrics, `trireme_llm_prefix_cache_${name}_total`, model));
  return lookups ? `${percent(hits / lookups)} of prompts cached` : "no prompt yet";
}

/** The rate of a counter between each two snapshots. */
function series(name, model) {
  return history.slice(1).map((now, at) => rate(history[at], now, name, model));
}

/** A bar of the KV blocks: used, cached, free. */
function newBar() {
  const parts = ["used", "cached", "free"].map((kind) => {
    const part = el("span", { class: `part ${kind}` });
    const label = el("span", {});
    return { kind, part, label, item: el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), label) };
  });
  const root = el("div", { class: "kv" }, el("div", { class: "track", "aria-hidden": "true" }, ...parts.map(({ part }) => part)),
    el("ul", { class: "legend", "aria-label": "KV blocks" }, ...parts.map(({ item }) => item)));
  return { root, parts };
}

function updateBar(bar, { all, used, cached }) {
  const counts = { used, cached: cached ?? 0, free: all - used - (cached ?? 0) };
  for (const { kind, part, label } of bar.parts) {
    part.style.width = `${(100 * counts[kind]) / Math.max(all, 1)}%`;
    setText(label, `KV ${kind} ${number(counts[kind])}`);
  }
}

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

function newChart(title) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const [area, line] = ["area", "line"].map((kind) => document.createElementNS(SVG, "path")).map((path, at) => {
    path.setAttribute("class", ["area", "line"][at]);
    svg.append(path);
    return path;
  });
  const most = el("span", { class: "muted small" });
  const root = el("figure", {}, el("figcaption", {}, el("span", {}, `${title}, last minute`), most), svg);
  return { root, area, line, most };
}

function updateChart(chart, values) {
  const most = Math.max(...values, 0);
  const x = (at) => WIDTH - ((values.length - 1 - at) * WIDTH) / (KEPT - 2);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 6) * value) / Math.max(most, 1e-9);
  const points = values.map((value, at) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  chart.line.setAttribute("d", line);
  chart.area.setAttribute("d", line && `${line}L${WIDTH} ${HEIGHT}L${x(0).toFixed(1)} ${HEIGHT}Z`);
  setText(chart.most, `peak ${number(most)}`);
}

function showFaults(server, metrics) {
  const total = (name, filter) => sum(metrics, name, undefined, filter) ?? 0;
  const failed = total("trireme_llm_sequences_ended_total", (sample) => sample.labels.reason === "failed");
  const cancelled = total("trireme_llm_sequences_ended_total", (sample) => sample.labels.reason === "cancelled");
  const entry = (term, count) => [term, count === null ? "–" : number(count), count > 0 ? "warned" : undefined];
  fillFacts(byId("faults"), [
    entry("World started again", server.world_restarts),
    entry("Workers started again", metrics && total("trireme_llm_worker_restarts_total")),
    ["Sequences recovered", metrics ? number(total("trireme_llm_recoveries_total")) : "–"],
    entry("Sequences failed", metrics && failed),
    ["Sequences cancelled", metrics ? number(cancelled) : "–"],
    entry("Requests refused by a limit", metrics && total("trireme_refused_requests_total")),
  ]);
}

function showMachine(metrics) {
  const of = (name) => sum(metrics, name);
  const facts = [
    ["CPU", percent(of("nv_cpu_utilization"))],
    ["Memory", `${bytes(of("nv_cpu_memory_used_bytes"))} of ${bytes(of("nv_cpu_memory_total_bytes"))}`],
  ];
  samples(metrics, "nv_gpu_utilization").forEach((gpu, at) => {
    const own = (name) => metrics[name]?.find((sample) => sample.labels.gpu_uuid === gpu.labels.gpu_uuid)?.value;
    facts.push([`GPU ${at}`, `${percent(gpu.value)}, ${bytes(own("nv_gpu_memory_used_bytes"))} of ${bytes(own("nv_gpu_memory_total_bytes"))}, ${number(own("nv_gpu_power_usage"), 0)} W`]);
  });
  const started = samples(metrics, "trireme_startup_seconds").find((sample) => sample.labels.phase === "total");
  if (started) facts.push(["Start until ready", duration(started.value)]);
  fillFacts(byId("machine"), facts);
}

function showWorkers(server, metrics) {
  const same = (left, right) => left.labels.worker === right.labels.worker && left.labels.model === right.labels.model;
  const other = (name, worker) => metrics[name]?.find((sample) => same(sample, worker))?.value;
  const rows = samples(metrics, "trireme_llm_worker_ready").map((worker) => {
    const { worker: rank, model, node, device, pid } = worker.labels;
    const lag = other("trireme_llm_worker_step_lag", worker);
    return [rank, node, device, model, pid, pill(worker.value > 0 ? "ready" : "loading", worker.value > 0), number(lag ?? null), bytes(other("trireme_llm_worker_memory_bytes", worker))];
  });
  const busy = new Set(rows.map(([rank]) => rank));
  server.ranks.forEach((node, rank) => busy.has(String(rank)) || rows.push([String(rank), node, "–", "–", "–", "no worker", "–", "–"]));
  rows.sort((left, right) => Number(left[0]) - Number(right[0]));
  fillTable(byId("workers"), ["Rank", "Node", "Device", "Model", "Process", "State", "Steps behind", "Memory"], rows, [4, 6, 7]);
}
