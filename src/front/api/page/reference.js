// The reference of the HTTP API, rendered from the description that the server embeds.

import { byId, el, fillTable } from "./dom.js";
import { call } from "./http.js";

let description = null;

/** Renders the reference when it is shown for the first time. */
export async function showReference() {
  if (description) return;
  try {
    description = await (await call("ui/openapi.json")).json();
  } catch (error) {
    byId("reference").replaceChildren(el("p", { class: "note" }, `The description cannot be read: ${error.message}`));
    return;
  }
  const operations = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  byId("reference").replaceChildren(el("p", { class: "wide-text" }, ...withCode(description.info.description)), ...operations.map(entry));
}

/** What a `$ref` leads to, or the value itself. */
function resolved(value) {
  if (!value?.$ref) return value ?? {};
  return value.$ref.slice(2).split("/").reduce((inner, key) => inner[key], description);
}

/** Text whose parts between backticks are code. */
function withCode(text) {
  return text.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

function entry({ path, method, operation }) {
  const responses = Object.entries(operation.responses);
  const summary = resolved(responses[0][1]).description ?? "";
  const body = operation.requestBody?.content["application/json"].schema;
  return el("details", { class: "card operation" },
    el("summary", {}, el("span", { class: `method ${method}` }, method.toUpperCase()), el("code", { class: "path" }, path), el("span", { class: "muted" }, ...withCode(summary))),
    ...parameters(operation.parameters),
    ...(body ? [el("h3", {}, "Request"), fields(body)] : []),
    el("h3", {}, "Responses"),
    ...responses.map(([status, response]) => answer(status, resolved(response))));
}

function parameters(list) {
  if (!list) return [];
  const table = el("table", {});
  const row = (parameter) => [el("code", {}, parameter.name), parameter.in, type(parameter.schema), parameter.required ? "yes" : "", parameter.description ?? ""];
  fillTable(table, ["Parameter", "In", "Type", "Required", ""], list.map(row));
  return [el("h3", {}, "Parameters"), scrolling(table, "Parameters")];
}

function answer(status, response) {
  const media = Object.entries(response.content ?? {});
  const parts = media.flatMap(([kind, { schema }]) => [el("p", { class: "small" }, el("code", {}, kind)), fields(schema)]);
  const title = status === "default" ? "Error" : status;
  return el("details", { class: "response" }, el("summary", {}, el("strong", {}, title), " ", ...withCode(response.description ?? "")), ...parts);
}

/** The fields of an object with those of its parts, or a line for another schema. */
function fields(schema) {
  const own = resolved(schema);
  const all = merged(own);
  const names = Object.keys(all.properties);
  if (!names.length) return el("p", { class: "small" }, type(schema));
  const order = [...names].sort((left, right) => all.required.has(right) - all.required.has(left));
  const row = (name) => [el("code", {}, name), type(all.properties[name]), all.required.has(name) ? "yes" : "", el("span", {}, ...withCode(notes(resolved(all.properties[name]))))];
  const table = el("table", {});
  fillTable(table, ["Field", "Type", "Required", "Values"], order.map(row));
  return scrolling(table, "Fields");
}

function scrolling(table, name) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
}

/** Properties and required names of a schema and of the schemas in its `allOf`; of alternatives, those of all. */
function merged(schema) {
  const required = new Set(schema.required ?? []);
  const properties = { ...schema.properties };
  for (const part of [...(schema.allOf ?? []), ...(schema.oneOf ?? [])].map(resolved)) {
    const inner = merged(part);
    Object.assign(properties, { ...inner.properties, ...properties });
    if (schema.allOf) inner.required.forEach((name) => required.add(name));
  }
  return { properties, required };
}

function type(schema) {
  if (schema?.$ref) return schema.$ref.split("/").pop();
  const one = schema ?? {};
  if (one.const !== undefined) return JSON.stringify(one.const);
  if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
  const alternatives = one.oneOf ?? one.anyOf;
  if (alternatives && !one.type) return [...new Set(alternatives.map(type))].join(" | ");
  const names = [one.type ?? "any"].flat();
  return names.map((name) => (name === "array" && one.items ? `list of ${type(one.items)}` : name)).join(" | ");
}

/** Bounds, default and description. */
function notes(schema) {
  const parts = [];
  const lowest = schema.minimum ?? (schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : undefined);
  if (lowest !== undefined && schema.maximum !== undefined) parts.push(`${lowest} to ${schema.maximum}`);
  else if (lowest !== undefined) parts.push(typeof lowest === "number" ? `from ${lowest}` : lowest);
  else if (schema.maximum !== undefined) parts.push(`up to ${schema.maximum}`);
  if (schema.maxItems !== undefined) parts.push(`at most ${schema.maxItems} items`);
  if (schema.maxLength !== undefined) parts.push(`at most ${schema.maxLength} characters`);
  if (schema.default !== undefined) parts.push(`default ${JSON.stringify(schema.default)}`);
  if (schema.description) parts.push(schema.description);
  return parts.join("; ");
}
