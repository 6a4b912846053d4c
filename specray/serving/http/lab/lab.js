// The lab page: reads its form, runs calls and shows what comes.

import { Output } from "./output.js";
import { Race } from "./race.js";
import { Rounds, expectedLength } from "./rounds.js";
import { read, stream } from "./stream.js";
import { Timeline } from "./timeline.js";

const METHODS = [
  { label: "none", speculation: { enabled: false } },
  { label: "repetitions (n-grams)", speculation: { draft: "ngram" } },
  { label: "draft model", speculation: { draft: "model" } },
  { label: "the service chooses", speculation: {} },
];
const PROMPTS = {
  chat: "What is the capital of France? Answer in one sentence.",
  completion: "def fibonacci(n):\n",
};

const find = (id) => document.getElementById(id);
const output = new Output(find("output"), find("detail"));
const timeline = new Timeline(find("timeline"), find("follow"));
const race = new Race(find);
let model = null;
let running = null;

function showSliders() {
  const k = Number(find("k").value);
  find("k-value").textContent = k === 0 ? "chosen by the service" : String(k);
  find("temperature-value").textContent = Number(find("temperature").value).toFixed(1);
  find("method-value").textContent = METHODS[Number(find("method").value)].label;
  for (const [id, text] of [["k", find("k-value").textContent], ["method", find("method-value").textContent]]) {
    find(id).setAttribute("aria-valuetext", text);
  }
}

function kind() {
  return find("kind-chat").checked ? "chat" : "completion";
}

/** Path and body of the call that the form describes. */
function call(method) {
  const temperature = Number(find("temperature").value);
  const k = Number(find("k").value);
  const speculation = { ...method.speculation };
  if (k > 0 && speculation.enabled !== false) speculation.num_speculative_tokens = k;
  // Rejection tells the draft's probabilities; without randomness there are none to tell.
  if (temperature > 0) speculation.verification = "rejection";
  const body = {
    model,
    max_tokens: Number(find("max-tokens").value),
    temperature,
    seed: Number(find("seed").value),
    stream: true,
    stream_options: { include_speculation: true, include_usage: true },
    return_speculation_metrics: true,
    speculation,
  };
  if (kind() === "chat") {
    const messages = [{ role: "user", content: find("prompt").value }];
    return ["v1/chat/completions", { ...body, messages, logprobs: true }];
  }
  return ["v1/completions", { ...body, prompt: find("prompt").value, logprobs: 0 }];
}

/** Runs a call; ``onRound`` is given each round and its number. Returns the rounds and the service's own numbers. */
async function run(method, onRound, signal) {
  const [path, body] = call(method);
  const rounds = new Rounds();
  let metrics = null;
  for await (const event of stream(path, body, find("key").value, signal)) {
    for (const round of event.speculation?.rounds ?? []) {
      rounds.add(round);
      onRound(round, rounds);
    }
    metrics = event.metrics?.speculative_decoding ?? metrics;
  }
  return { rounds, metrics };
}

async function runOnce(signal) {
  output.clear();
  timeline.clear();
  const { rounds, metrics } = await run(METHODS[Number(find("method").value)], show, signal);
  showNumbers(rounds, metrics);
}

function show(round, rounds) {
  output.add(round, rounds.all.length);
  timeline.add(round);
  showNumbers(rounds, null);
  showDecisions(rounds);
}

async function runRace(signal) {
  race.clear();
  output.clear();
  timeline.clear();
  const chosen = METHODS[Number(find("method").value)];
  const text = (round) => round.tokens.map((token) => token.text).join("");
  const off = await run(METHODS[0], (round) => race.add("off", text(round), round.verify.ended_ms), signal);
  race.end("off", off.rounds);
  const drafting = chosen.speculation.enabled === false ? METHODS.at(-1) : chosen;
  const arm = (round, rounds) => {
    race.add("on", text(round), round.verify.ended_ms);
    show(round, rounds);
  };
  const on = await run(drafting, arm, signal);
  race.end("on", on.rounds);
  race.finish(off.rounds, on.rounds, Number(find("temperature").value) > 0);
  showNumbers(on.rounds, on.metrics, off.rounds.tokensPerSecond);
}

function showNumbers(rounds, metrics, plainSpeed = null) {
  const medians = rounds.medians;
  const speed = rounds.tokensPerSecond;
  const entries = [
    ["Tokens", rounds.numTokens],
    ["Tokens a second", fixed(speed, 1)],
    ["Rounds", rounds.all.length],
    ["Acceptance rate", fixed(metrics ? metrics.draft_acceptance_rate : rounds.acceptanceRate, 3)],
    ["Tokens a round with drafts", fixed(metrics ? metrics.mean_acceptance_length : rounds.acceptanceLength, 2)],
    ["Draft tokens", metrics ? metrics.num_draft_tokens : rounds.numDrafts],
    ["Accepted", metrics ? metrics.num_accepted_draft_tokens : rounds.numAccepted],
    ["Foreseen by the draft", fixed(rounds.hitRate, 2)],
    ["Verification, ms", fixed(medians.verify, 1)],
    ["Draft step, ms", fixed(medians.draft, 1)],
  ];
  if (plainSpeed && speed) entries.push(["Speed-up, measured", `${(speed / plainSpeed).toFixed(2)}×`]);
  find("numbers").replaceChildren(...entries.map(([name, value]) => entry(name, value)));
  showFormula(rounds);
}

function showFormula(rounds) {
  const [a, k, length] = [rounds.chance, rounds.meanK, rounds.acceptanceLength];
  if (a === null || k === null || length === null) {
    find("formula").textContent = "";
    return;
  }
  const expected = expectedLength(a, k);
  find("formula").textContent =
    `Measured: ${length.toFixed(2)} tokens a round. The formula τ = (1 − a^(K+1)) / (1 − a) says ${expected.toFixed(2)} ` +
    `at the measured chance of acceptance a = ${a.toFixed(3)} and the mean K = ${k.toFixed(2)}: it takes chances to be the ` +
    "same at every token, and K to be the same in every round.";
}

function showDecisions(rounds) {
  const rows = [...rounds.reasons.values()].map((plan) => {
    const cells = [plan.numRounds, plan.what, plan.reason.replaceAll("_", " "), `${plan.numAccepted} of ${plan.numDrafts}`];
    const row = document.createElement("tr");
    row.append(...cells.map((text) => element("td", text)));
    return row;
  });
  find("decisions").replaceChildren(...rows);
}

function entry(name, value) {
  const pair = document.createElement("div");
  pair.append(element("dt", name), element("dd", value));
  return pair;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = String(text);
  return made;
}

function fixed(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

/** Runs something that can be stopped, with the form's buttons as they must be. */
async function attempt(work) {
  if (running !== null) return;
  running = new AbortController();
  setRunning(true);
  find("problem").textContent = "";
  try {
    if (model === null) await connect();
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") find("problem").textContent = error.message;
  } finally {
    running = null;
    setRunning(false);
  }
}

function setRunning(isRunning) {
  for (const id of ["run", "race"]) find(id).disabled = isRunning;
  find("stop").disabled = !isRunning;
  document.body.dataset.state = isRunning ? "running" : "idle";
}

async function connect() {
  const key = find("key").value;
  const answer = await read("v1/models", key);
  const about = await read("tokenizer_info", key).catch(() => ({}));
  if (about.chat_template) find("kind-chat").checked = true;
  else find("kind-chat").disabled = true;
  setPrompt();
  model = answer.data[0].id;
  find("model").textContent = model;
}

function setPrompt() {
  const prompt = find("prompt");
  if (prompt.value === "" || Object.values(PROMPTS).includes(prompt.value)) prompt.value = PROMPTS[kind()];
}

function setTheme(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  find("theme").setAttribute("aria-pressed", String(isDark));
}

for (const id of ["k", "temperature", "method"]) find(id).addEventListener("input", showSliders);
for (const id of ["kind-chat", "kind-completion"]) find(id).addEventListener("change", setPrompt);
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(runOnce);
});
find("race").addEventListener("click", () => attempt(runRace));
find("stop").addEventListener("click", () => running?.abort());
find("show-rejected").addEventListener("change", (event) => {
  find("output").classList.toggle("with-rejected", event.target.checked);
});
find("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
showSliders();
setPrompt();
connect().catch((error) => {
  find("model").textContent = "";
  find("problem").textContent = `${error.message} (an API key is under More)`;
});
