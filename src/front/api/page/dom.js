// Small helpers to build elements. Text is always set as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `hidden`, `onclick` …) and children, which are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets the text of an element if it differs, so that nothing is selected or announced anew without need. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fills a table with a head and rows of cells, which are texts or elements. `numeric` are the indices of right-aligned columns. */
export function fillTable(table, head, rows, numeric = []) {
  const kind = (index) => (numeric.includes(index) ? "number" : undefined);
  const line = (tag, cells, scope) => el("tr", {}, ...cells.map((cell, at) => el(tag, { class: kind(at), scope }, cell)));
  table.replaceChildren(el("thead", {}, line("th", head, "col")), el("tbody", {}, ...rows.map((cells) => line("td", cells))));
}

/** Fills a list of terms and values; the third member of an entry is a class. */
export function fillFacts(list, facts) {
  const entry = ([term, value, kind]) => el("div", {}, el("dt", {}, term), el("dd", { class: kind }, value));
  list.replaceChildren(...facts.map(entry));
}

/** Copies a text. Browsers have a clipboard only on secure origins, so the selection is the way on others. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "outside", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const toast = byId("copied");
  toast.textContent = "Copied";
  setTimeout(() => (toast.textContent = ""), 1500);
}

/** A block of code with a button that copies it. */
export function codeBlock(text, name) {
  const button = el("button", { type: "button", class: "quiet copy", "aria-label": `Copy ${name}`, onclick: () => copy(text) }, "Copy");
  return el("div", { class: "block" }, button, el("pre", { tabindex: "0", role: "region", "aria-label": name }, el("code", {}, text)));
}
