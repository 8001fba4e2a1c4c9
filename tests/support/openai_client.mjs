// Uses the `openai` package of npm against a server: node openai_client.mjs PACKAGES BASE_URL API_KEY EMBEDDER.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [packages, baseURL, apiKey, embedder] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(createRequire(`${packages}/`).resolve("openai")));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "How long do refunds for printed books take?" }];
const found = {};

found.models = [];
for await (const one of client.models.list()) found.models.push(one.id);
found.model = await client.models.retrieve("collection:/a%2Fb shop");
found.chat = await client.chat.completions.create({ model: "collection:shop", messages });

const stream = await client.chat.completions.create({
  model: "all", messages, stream: true, stream_options: { include_usage: true },
});
found.chunks = [];
for await (const chunk of stream) found.chunks.push(chunk);

found.embeddings = await client.embeddings.create({ model: embedder, input: ["one", "two"] });
found.response = await client.responses.create({ model: "all", input: messages[0].content, store: false });
found.events = [];
const events = await client.responses.create({ model: "all", input: messages[0].content, stream: true });
for await (const event of events) found.events.push(event);

try {
  await client.chat.completions.create({ model: "collection:secret", messages });
} catch (error) {
  found.error = { status: error.status, code: error.code, type: error.type, kind: error.constructor.name };
}
console.log(JSON.stringify(found));
