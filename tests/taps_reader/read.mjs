// Reads the taps of a run and validates every message by the AsyncAPI document: a reader that has no code of ours.
//
//   atoll tap --schema > asyncapi.json
//   npm ci && node read.mjs --document asyncapi.json --server nats://127.0.0.1:4222 --run my-run
//
// A locked broker lets in a reader's identity: `--server tls://… --identity eye.toml`, the file that `atoll keys add` writes.
// Signatures are taken off here and not checked; `atoll tap` checks them.
//
// It says `ready` when it listens. Ctrl-C (or the end of the broker) ends it: then it prints how many messages of each kind it
// has read, as JSON, and exits with 1 if one of them, or the document, is not what it should be.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { checkServerIdentity } from "node:tls";
import { parseArgs } from "node:util";

import { connect, nkeyAuthenticator } from "@nats-io/transport-node";
import Ajv from "ajv";
import addFormats from "ajv-formats";

const SHOWN = 20;

const { values: asked } = parseArgs({
  options: {
    document: { type: "string" },
    server: { type: "string" },
    run: { type: "string" },
    identity: { type: "string" },
  },
});
for (const name of ["document", "server", "run"]) {
  if (!asked[name]) {
    console.error(`--${name} is missing; see the first lines of this file`);
    process.exit(2);
  }
}

const document = JSON.parse(readFileSync(asked.document, "utf8"));
const faults = checkDocument(document);
const channels = channelsOf(document, asked.run);
const read = {};

const broker = await connect({
  servers: asked.server.split(","),
  reconnect: false,
  ...admission(asked.identity, asked.server.split(",")),
});
const taps = broker.subscribe(`atoll.${asked.run}.tap.>`);
await broker.flush();
console.log("ready");
for (const signal of ["SIGINT", "SIGTERM"]) {
  process.on(signal, () => broker.drain());
}

for await (const message of taps) {
  const channel = channels.find((one) => one.pattern.test(message.subject));
  const kind = channel ? channel.kind : "unknown";
  read[kind] = (read[kind] ?? 0) + 1;
  const wrong = channel ? faultOf(channel, message) : "no channel of the document has this address";
  if (wrong) faults.push(`${message.subject}: ${wrong}`);
}
console.log(JSON.stringify({ read, faults: faults.length, first: faults.slice(0, SHOWN) }));
process.exit(faults.length ? 1 : 0);

// Returns how to enter a locked broker: with the key of an identity, over TLS that trusts the authority of the broker.
function admission(file, servers) {
  if (!file) return {};
  const text = readFileSync(file, "utf8");
  const [, seed] = text.match(/^seed = "(.+)"$/m);
  const [, ca] = text.match(/^authority = """\n([^"]+)"""$/m);
  // The client names no host where the address is a number; the certificate must be that of a host that we asked for.
  const hosts = servers.map((server) => new URL(server).hostname);
  const isTheirs = (certificate) => hosts.some((host) => !checkServerIdentity(host, certificate));
  const check = (host, certificate) => (isTheirs(certificate) ? undefined : checkServerIdentity(host, certificate));
  return {
    authenticator: nkeyAuthenticator(new TextEncoder().encode(seed)),
    tls: { ca, checkServerIdentity: check },
  };
}

// Returns what is wrong with the document itself, by the official schema of AsyncAPI 3.
function checkDocument(document) {
  const official = createRequire(import.meta.url)("@asyncapi/specs/schemas/3.0.0-without-$id.json");
  const ajv = new Ajv({ strict: false, allErrors: true });
  addFormats(ajv);
  const isDocument = ajv.compile(official);
  return isDocument(document) ? [] : [`the document: ${ajv.errorsText(isDocument.errors)}`];
}

// Returns each channel with a pattern of its address and what validates its payload; the most exact address comes first.
function channelsOf(document, run) {
  const ajv = new Ajv({ strict: false, allErrors: true });
  addFormats(ajv);
  ajv.addSchema(document, "taps");
  const made = Object.values(document.channels).flatMap((channel) =>
    Object.entries(channel.messages).map(([kind, { $ref }]) => {
      const message = resolve(document, $ref);
      const levels = channel.address.replace("{run}", run).split(".");
      const pattern = levels.map((level) => (level.startsWith("{") ? "[A-Za-z0-9_-]+" : level)).join("\\.");
      return {
        kind,
        fixed: levels.filter((level) => !level.startsWith("{")).length,
        pattern: new RegExp(`^${pattern}$`),
        payload: ajv.compile({ $ref: `taps${message.payload.$ref}` }),
        headers: ajv.compile(message.headers),
        wrongs: (found) => ajv.errorsText(found),
      };
    }),
  );
  return made.sort((one, other) => other.fixed - one.fixed);
}

function resolve(document, reference) {
  return reference.slice(2).split("/").reduce((node, key) => node[key], document);
}

// Returns what is wrong with a message, or the empty string.
function faultOf(channel, message) {
  const headers = Object.fromEntries([...(message.headers ?? [])].map(([name, [value]]) => [name, value]));
  if (!channel.headers(headers)) return `headers: ${channel.wrongs(channel.headers.errors)}`;
  const [text] = message.string().split("\nsigned:"); // a locked run: the signature stands behind the message
  let body;
  try {
    body = JSON.parse(text);
  } catch (error) {
    return `no JSON: ${error.message}`;
  }
  return channel.payload(body) ? "" : channel.wrongs(channel.payload.errors);
}
