// Requests to this server. Keys stay in this module, and are forgotten when the page is closed.

const keys = new Map();
const declined = new Set();
let ask = async () => false;

/** An answer other than success. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** The header that the server expects a key in; null if it expects none. */
  get header() {
    if (this.status !== 401 && this.status !== 403) return null;
    return this.message.match(/expecting header '([^']+)'/)?.[1] ?? (this.status === 401 ? "authorization" : null);
  }
}

/** Sets the function that asks the user for the key of an `ApiError`; it resolves to whether there is one. */
export function onMissingKey(question) {
  ask = question;
}

/** Uses a key from now on; an empty one removes it. */
export function setKey(header, key) {
  const name = header.trim().toLowerCase();
  declined.clear();
  if (!key) keys.delete(name);
  else keys.set(name, name === "authorization" && !/^bearer /i.test(key) ? `Bearer ${key}` : key);
}

export const hasKey = () => keys.size > 0;

/** Sends a request; asks for a key and tries again if one is missing. Throws `ApiError` for other failures. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const headers = Object.fromEntries(keys);
    if (body !== undefined) headers["content-type"] = "application/json";
    const method = body === undefined ? "GET" : "POST";
    const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, credentials: "omit", cache: "no-store" });
    if (response.ok) return response;
    const error = new ApiError(response.status, messageOf(await response.text(), response.status));
    if (!error.header || declined.has(error.header)) throw error;
    if (!(await ask(error))) {
      declined.add(error.header);
      throw error;
    }
  }
}

/** Allows that the user is asked again for keys that were declined before. */
export function askAgain() {
  declined.clear();
}

function messageOf(text, status) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return text.trim() || `status ${status}`;
  }
}

/** The data of each server-sent event of an answer, until `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
