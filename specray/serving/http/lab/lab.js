// The lab page: runs what its form asks for and shows what comes.

import { Figures } from "./figures.js";
import { Form } from "./form.js";
import { Lane } from "./lane.js";
import { Output } from "./output.js";
import { Rounds } from "./rounds.js";
import { read, stream } from "./stream.js";
import { Timeline } from "./timeline.js";

const TICK_MS = 66;
const FIGURES_MS = 250;

const find = (id) => document.getElementById(id);
const form = new Form(find);
const figures = new Figures(find);
const timeline = new Timeline(find("bars"), find("rows"), find("whole"));
const lanes = Object.fromEntries(
  ["off", "on"].map((name) => [name, new Lane(find(name), find(`${name}-time`), new Output(find(`${name}-text`), find("detail")))]),
);
let model = null;
let running = null;
let clock = null;
/** Shows the figures of the rounds that came since they were last shown, from a time on; null: there were none. */
let due = null;
let dueFrom = 0;

/** Runs a call into a lane. Returns its rounds and the service's own numbers. */
async function run(method, lane, signal) {
  const [path, body] = form.call(model, method);
  const rounds = new Rounds();
  let metrics = null;
  try {
    for await (const event of stream(path, body, form.key, signal)) {
      for (const round of event.speculation?.rounds ?? []) {
        rounds.add(round);
        lane.add(round, rounds);
        timeline.add(round, lane === lanes.off);
        due = () => showFigures(lane, rounds, null);
      }
      metrics = event.metrics?.speculative_decoding ?? metrics;
    }
  } finally {
    lane.stop();
  }
  due = null;
  showFigures(lane, rounds, metrics);
  return rounds;
}

function showFigures(lane, rounds, metrics) {
  figures.showSpeed(rounds.tokensPerSecond);
  if (lane === lanes.off) return;
  figures.show(rounds, metrics);
  figures.showCounts(lanes.on.output.counts);
}

async function runOnce(signal) {
  clear("run");
  say("Running…");
  start(lanes.on);
  const rounds = await run(form.method, lanes.on, signal);
  timeline.stop(false);
  const speed = rounds.tokensPerSecond === null ? "" : `, ${rounds.tokensPerSecond.toFixed(1)} a second`;
  say(`${rounds.numTokens} tokens in ${rounds.all.length} rounds and ${(lanes.on.endMs / 1e3).toFixed(1)} s${speed}.`);
}

/**
 * First with drafts, then without them: neither takes the other's cores, and what the service remembers of the first
 * can only help the second. While the second runs the first is shown again beside it.
 */
async function runRace(signal) {
  clear("race");
  say("With drafts…");
  start(lanes.on);
  const on = await run(form.method === "none" ? "auto" : form.method, lanes.on, signal);
  say("Without drafts; beside it the first run again, on the same clock…");
  start(lanes.off);
  again(lanes.on);
  const off = await run("none", lanes.off, signal);
  while (lanes.on.isRunning && !signal.aborted) await new Promise((done) => setTimeout(done, TICK_MS));
  timeline.stop(true);
  finishRace(on, off);
}

function finishRace(on, off) {
  const [drafted, plain] = [on.tokensPerSecond, off.tokensPerSecond];
  const isSame = lanes.on.output.text === lanes.off.output.text;
  const other =
    form.temperature > 0
      ? "The texts differ: under rejection drafts change which draws count, not their probabilities."
      : "The texts differ: on a GPU, or without the decoder's kernels, the width of a forward decides near ties.";
  const speeds = drafted && plain ? `${drafted.toFixed(1)} against ${plain.toFixed(1)} tokens a second. ` : "";
  figures.showRace(drafted, plain);
  say(speeds + (isSame ? "Both texts are the same." : other));
  find("replay").hidden = false;
}

function clear(mode) {
  document.body.dataset.mode = mode;
  find("on-title").textContent = mode === "race" ? "With drafts" : "Answer";
  find("replay").hidden = true;
  for (const lane of Object.values(lanes)) lane.clear();
  timeline.clear(mode === "race");
  figures.show(new Rounds(), null);
  figures.showCounts({});
  figures.showSpeed(null);
}

function start(lane) {
  const now = performance.now();
  lane.start(now);
  timeline.start(now);
  tickOn();
}

/** Shows a run once more at its own pace, where the browser's user does not mind motion. */
function again(lane) {
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) lane.start(performance.now(), true);
}

function replay() {
  if (running !== null) return;
  timeline.start(performance.now());
  for (const lane of Object.values(lanes)) again(lane);
  tickOn();
}

/** Moves clocks, texts and timeline as long as one of them goes. */
function tickOn() {
  clock ??= setInterval(() => {
    const now = performance.now();
    for (const lane of Object.values(lanes)) lane.tick(now);
    timeline.tick(now);
    if (now > dueFrom) showDue(now);
    if (running !== null || Object.values(lanes).some((lane) => lane.isRunning)) return;
    clearInterval(clock);
    clock = null;
    timeline.stop(document.body.dataset.mode === "race");
  }, TICK_MS);
}

function showDue(now) {
  due?.();
  due = null;
  dueFrom = now + FIGURES_MS;
}

function say(text) {
  find("status").textContent = text;
}

/** Runs something that can be stopped, with the form's buttons as they must be. */
async function attempt(work) {
  if (running !== null || !find("ask").reportValidity()) return;
  running = new AbortController();
  find("problem").textContent = "";
  // The focus of a button that goes away moves to the one in its place, and back.
  const pressed = [find("run"), find("race")].find((button) => button === document.activeElement);
  setRunning(true);
  if (pressed) find("stop").focus();
  try {
    if (model === null) await connect();
    if (matchMedia("(max-width: 59.99rem)").matches) find("result").scrollIntoView();
    await work(running.signal);
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : "No answer.");
    if (error.name !== "AbortError") find("problem").textContent = error.message;
  } finally {
    const isFocused = [find("stop"), document.body].includes(document.activeElement);
    for (const lane of Object.values(lanes)) if (lane.isRunning) lane.stop();
    running = null;
    setRunning(false);
    if (isFocused) pressed?.focus({ preventScroll: true });
  }
}

function setRunning(isRunning) {
  for (const id of ["run", "race"]) find(id).hidden = isRunning;
  find("stop").hidden = !isRunning;
  document.body.dataset.state = isRunning ? "running" : "idle";
}

async function connect() {
  const answer = await read("v1/models", form.key);
  const names = answer.data.map((entry) => entry.id);
  const choice = find("models");
  choice.replaceChildren(...names.map((name) => new Option(name)));
  choice.hidden = names.length < 2;
  await choose(names[0]);
}

/** Asks this model from now on; one of several may have to be loaded by its first run. */
async function choose(name) {
  const about = await read(`tokenizer_info?model=${encodeURIComponent(name)}`, form.key).catch(() => ({}));
  form.allowChat(Boolean(about.chat_template));
  model = name;
  find("model").textContent = find("models").hidden ? model : "";
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(runOnce);
});
find("race").addEventListener("click", () => attempt(runRace));
find("replay").addEventListener("click", replay);
find("models").addEventListener("change", (event) => choose(event.target.value));
find("stop").addEventListener("click", () => running?.abort());
find("stop").addEventListener("keydown", (event) => {
  // The key that started the run is still down.
  if (event.repeat) event.preventDefault();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
find("show-rejected").addEventListener("change", (event) => {
  find("lanes").classList.toggle("with-rejected", event.target.checked);
});
figures.show(new Rounds(), null);
figures.showSpeed(null);
connect().catch((error) => {
  find("model").textContent = "";
  find("problem").textContent = error.message;
});
