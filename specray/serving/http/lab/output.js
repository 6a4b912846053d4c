// The output by token: colours, rejected draft tokens, and the details of the token that is pointed at.

import { acceptedNodes } from "./rounds.js";

const KINDS = {
  accepted: "accepted draft token",
  filler: "accepted filler",
  recovered: "the target's own, after a rejection",
  bonus: "the target's own, after a full acceptance",
  target: "the target's own; nothing was drafted",
  rejected: "rejected draft token",
};

/** Sources of draft tokens that are models. */
const MODELS = ["model", "features"];

/** Tokens of one answer, in an element whose arrow keys go from token to token. */
export class Output {
  constructor(element, detail) {
    this.element = element;
    this.detail = detail;
    this.idle = detail.textContent;
    this.about = new WeakMap();
    this.clear();
    element.addEventListener("pointerover", (event) => this.choose(tokenAt(event.target)));
    element.addEventListener("click", (event) => this.choose(tokenAt(event.target)));
    element.addEventListener("keydown", (event) => this.step(event));
  }

  clear() {
    this.element.replaceChildren();
    this.detail.textContent = this.idle;
    this.chosen = null;
    this.spans = [];
    this.numShown = 0;
    this.counts = {};
  }

  get text() {
    return this.spans.filter(({ kind }) => kind !== "rejected").map(({ span }) => span.textContent).join("");
  }

  /** Adds the tokens of a round, which is the number-th. */
  add(round, number) {
    const nodes = acceptedNodes(round);
    const places = [...nodes];
    round.tokens.forEach((token, place) => {
      const isFiller = token.kind === "accepted" && !MODELS.includes(round.source);
      const drafted = token.kind === "accepted" ? round.draft[places[place]] : undefined;
      this.put(isFiller ? "filler" : token.kind, token, drafted, round, number);
      if (token.kind === "recovered") this.putRejected(round, nodes, number);
    });
    this.advance(Infinity);
  }

  putRejected(round, nodes, number) {
    round.draft.forEach((token, index) => {
      if (!nodes.has(index)) this.put("rejected", { ...token, logprob: null }, token, round, number);
    });
  }

  put(kind, token, drafted, round, number) {
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.textContent = token.text;
    this.about.set(span, { kind, token, drafted, round, number });
    this.spans.push({ span, kind, ms: round.verify.ended_ms });
    this.counts[kind] = (this.counts[kind] ?? 0) + 1;
  }

  /** Takes every token off the page; ``advance`` brings them back. */
  rewind() {
    this.element.replaceChildren();
    this.numShown = 0;
  }

  /** Shows the tokens that had come after so many milliseconds, with the last of them in view. */
  advance(ms) {
    const first = this.numShown;
    while (this.numShown < this.spans.length && this.spans[this.numShown].ms <= ms) this.numShown += 1;
    if (first === this.numShown) return;
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
    this.element.append(...this.spans.slice(first, this.numShown).map(({ span }) => span));
    if (isAtEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  choose(span) {
    if (!span || span === this.chosen) return;
    this.chosen?.classList.remove("chosen");
    this.chosen = span;
    span.classList.add("chosen");
    this.detail.textContent = describe(this.about.get(span));
  }

  step(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const shown = [...this.element.children].filter((span) => span.offsetParent !== null);
    const now = shown.indexOf(this.chosen);
    const next = now < 0 ? (by > 0 ? 0 : shown.length - 1) : Math.min(shown.length - 1, Math.max(0, now + by));
    this.choose(shown[next]);
    shown[next]?.scrollIntoView({ block: "nearest" });
  }
}

function tokenAt(element) {
  return element instanceof Element ? element.closest(".text > .token") : null;
}

function describe({ kind, token, drafted, round, number }) {
  const lines = [
    `${JSON.stringify(token.text)} (${token.id}): ${KINDS[kind]}.`,
    `Target: ${token.logprob === null ? "not told" : percent(Math.exp(token.logprob))}. ` +
      `Draft: ${drafted?.probability == null ? "not told" : percent(drafted.probability)}.`,
    `Round ${number}: ${round.num_accepted_tokens} of ${round.draft.length} draft tokens accepted` +
      (round.source ? `, from ${round.source}` : "") +
      `; verified in ${round.verify.forward_ms.toFixed(1)} ms` +
      (round.drafting.length ? `, drafted in ${sum(round.drafting).toFixed(1)} ms` : "") +
      (round.lookup ? `; drafted ahead: ${round.lookup.replaceAll("_", " ")}` : "") +
      `; plan: ${round.overlap}, K ${round.num_speculative_tokens}, because ${round.reason.replaceAll("_", " ")}.`,
  ];
  return lines.join(" ");
}

function sum(steps) {
  return steps.reduce((total, step) => total + step.forward_ms, 0);
}

function percent(probability) {
  return `${(100 * probability).toFixed(1)} %`;
}
