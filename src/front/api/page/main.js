// Starts the page: sections, the dialog for keys, models, and the parts.

import { showClients } from "./clients.js";
import { byId, el } from "./dom.js";
import { call, hasKey, onMissingKey, setKey } from "./http.js";
import { startPlayground } from "./playground.js";
import { showReference } from "./reference.js";
import { poll, start } from "./status.js";

const SECTIONS = ["status", "playground", "api", "clients"];
const MODELS_INTERVAL_MS = 10_000;

function showSection() {
  const wanted = location.hash.slice(1);
  const section = SECTIONS.includes(wanted) ? wanted : SECTIONS[0];
  for (const name of SECTIONS) {
    byId(name).hidden = name !== section;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`${section}-title`).textContent} · Trireme`;
  if (section === "api") showReference();
  if (section === "clients") showClients();
}

/** Asks for a key; `error` says which. Resolves to whether one was given. Questions at the same time share one dialog. */
let question = null;
function askForKey(error) {
  const dialog = byId("key-dialog");
  question ??= new Promise((resolve) => {
    byId("key-reason").textContent = error ? error.message : "Sent with each request of this page.";
    if (error?.header) byId("key-header").value = error.header;
    byId("key-value").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      question = null;
      const isGiven = dialog.returnValue === "use";
      if (isGiven) setKey(byId("key-header").value, byId("key-value").value);
      byId("key-value").value = "";
      byId("key-button").textContent = hasKey() ? "API key set" : "API key";
      resolve(isGiven && hasKey());
    }, { once: true });
    dialog.showModal();
    byId("key-value").focus();
  });
  return question;
}

/** Fills both lists of models and keeps what is chosen. */
async function readModels() {
  let names = [];
  try {
    names = (await (await call("v1/models")).json()).data.map((model) => model.id);
  } catch {
    // The status says what is wrong.
  }
  for (const id of ["model", "client-model"]) {
    const select = byId(id);
    const known = [...select.options].map((option) => option.value);
    if (known.join("\n") === names.join("\n") && known.length) continue;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
    if (!names.length) select.append(el("option", { value: "" }, "no model that answers text"));
    select.dispatchEvent(new Event("change"));
  }
  setTimeout(readModels, MODELS_INTERVAL_MS);
}

onMissingKey(askForKey);
byId("key-button").addEventListener("click", async () => (await askForKey(null), poll()));
addEventListener("hashchange", () => (showSection(), byId("content").focus()));
startPlayground();
showSection();
start();
readModels();
