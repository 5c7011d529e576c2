// Snippets for each client, with this server's address and the chosen model.

import { byId, codeBlock, el } from "./dom.js";
import { call } from "./http.js";

const QUESTION = "Tell me a story about a brave cat.";
let isListening = false;

/** Renders the snippets, and again whenever another model is chosen. */
export async function showClients() {
  const select = byId("client-model");
  if (!isListening) select.addEventListener("change", showClients);
  isListening = true;
  const facts = await server();
  const place = {
    origin: new URL(".", location.href).href.replace(/\/$/, ""),
    host: location.hostname,
    grpc: facts.grpc_port ?? 8001,
    grpcTls: Boolean(facts.grpc_tls),
    needsKey: Boolean(facts.needs_key),
    model: select.value || "MODEL",
  };
  const card = ({ title, install, code }) =>
    el("section", { class: "card snippet" }, el("h2", {}, title), el("p", { class: "muted small" }, install), codeBlock(code, title));
  byId("snippets").replaceChildren(...snippets(place).map(card));
}

/** Ports and keys from the status; nothing if it cannot be read. */
async function server() {
  try {
    return (await (await call("ui/status.json")).json()).server;
  } catch {
    return {};
  }
}

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const quoted = (text) => JSON.stringify(text);

function snippets(place) {
  const { origin, host, grpc, grpcTls, needsKey, model } = place;
  const pythonKey = needsKey ? 'os.environ["TRIREME_API_KEY"]' : '"none"';
  const pythonOs = needsKey ? "import os\n\n" : "";
  const nodeKey = needsKey ? "process.env.TRIREME_API_KEY" : '"none"';
  const body = { model, messages: [{ role: "user", content: QUESTION }], max_tokens: 64, stream: true };
  const curlKey = needsKey ? '  -H "Authorization: Bearer $TRIREME_API_KEY" \\\n' : "";
  const tritonHeaders = needsKey ? ', headers={"authorization": "Bearer " + os.environ["TRIREME_API_KEY"]}' : "";
  return [
    {
      title: "curl",
      install: needsKey ? "TRIREME_API_KEY holds the key." : "No key is needed.",
      code: `curl -N ${origin}/v1/chat/completions \\\n${curlKey}  -H 'Content-Type: application/json' \\\n  -d ${shell(JSON.stringify(body))}`,
    },
    {
      title: "Python, openai",
      install: "pip install openai",
      code: `${pythonOs}from openai import OpenAI

client = OpenAI(base_url=${quoted(`${origin}/v1`)}, api_key=${pythonKey})
stream = client.chat.completions.create(
    model=${quoted(model)},
    messages=[{"role": "user", "content": ${quoted(QUESTION)}}],
    max_tokens=64,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()`,
    },
    {
      title: "Python, anthropic",
      install: "pip install anthropic",
      code: `${pythonOs}from anthropic import Anthropic

client = Anthropic(base_url=${quoted(origin)}, api_key=${pythonKey})
with client.messages.stream(
    model=${quoted(model)},
    messages=[{"role": "user", "content": ${quoted(QUESTION)}}],
    max_tokens=64,
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()`,
    },
    {
      title: "Node, openai",
      install: "npm install openai",
      code: `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${quoted(`${origin}/v1`)}, apiKey: ${nodeKey} });
const stream = await client.chat.completions.create({
  model: ${quoted(model)},
  messages: [{ role: "user", content: ${quoted(QUESTION)} }],
  max_tokens: 64,
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();`,
    },
    {
      title: "Python, tritonclient",
      install: "pip install 'tritonclient[grpc]' numpy",
      code: `${pythonOs}import numpy as np
import tritonclient.grpc as triton

prompt = triton.InferInput("text_input", [1, 1], "BYTES")
prompt.set_data_from_numpy(np.array([[${quoted(QUESTION)}.encode()]], dtype=object))
length = triton.InferInput("max_tokens", [1, 1], "INT32")
length.set_data_from_numpy(np.array([[64]], dtype=np.int32))
answers = []
with triton.InferenceServerClient(${quoted(`${host}:${grpc}`)}${grpcTls ? ", ssl=True" : ""}) as client:
    client.start_stream(lambda result, error: answers.append((result, error))${tritonHeaders})
    client.async_stream_infer(${quoted(model)}, [prompt, length])
    client.stop_stream()  # Waits for the last answer.
for result, error in answers:
    if error:
        raise error
    print(b"".join(result.as_numpy("text_output").flatten()).decode(), end="")
print()`,
    },
    {
      title: "trireme client",
      install: needsKey || grpcTls ? "It sends no key and uses no TLS, which this server requires; for others:" : "The program of this server.",
      code: `trireme client --url ${host}:${grpc} --model ${shell(model)} ${shell(QUESTION)}`,
    },
    {
      title: "Triton's generate, curl",
      install: "Triton's own extension of HTTP.",
      code: `curl ${origin}/v2/models/${encodeURIComponent(model)}/generate \\\n${curlKey}  -d ${shell(JSON.stringify({ text_input: QUESTION, max_tokens: 64 }))}`,
    },
  ];
}
