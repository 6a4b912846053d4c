// Numbers of a run, from its rounds while it goes on and from the service's own counters at its end.

import { expectedLength } from "./rounds.js";

/** Shows figures in the page's elements; ``find`` gives an element by its id. */
export class Figures {
  constructor(find) {
    this.find = find;
    this.counts = [...document.querySelectorAll("#legend [data-kind]")];
  }

  /** Tokens a second as the large one. */
  showSpeed(speed) {
    this.large(speed === null ? "0.0" : speed.toFixed(1), "tokens a second", speed === null ? "none" : "");
  }

  /** What a race came to as the large one; without a speed of both: none. */
  showRace(drafted, plain) {
    const isKnown = drafted !== null && plain !== null;
    this.large(isKnown ? `${(drafted / plain).toFixed(2)}×` : "–", "as fast with drafts", isKnown ? "final" : "none");
  }

  large(value, unit, kind) {
    this.find("figure-value").textContent = value;
    this.find("figure-unit").textContent = unit;
    this.find("figure").className = kind;
  }

  /** All others; ``metrics`` is what the service counted, null before it has told. */
  show(rounds, metrics) {
    const medians = rounds.medians;
    this.put("short", [
      ["Acceptance rate", fixed(metrics ? metrics.draft_acceptance_rate : rounds.acceptanceRate, 3)],
      ["Tokens a round", fixed(metrics ? metrics.mean_acceptance_length : rounds.acceptanceLength, 2)],
      ["First token, ms", fixed(rounds.all[0]?.verify.ended_ms, 0)],
      ["Tokens", rounds.numTokens],
    ]);
    this.put("numbers", [
      ["Rounds", rounds.all.length],
      ["Draft tokens", metrics ? metrics.num_draft_tokens : rounds.numDrafts],
      ["Accepted", metrics ? metrics.num_accepted_draft_tokens : rounds.numAccepted],
      ["Foreseen by the draft", fixed(rounds.hitRate, 2)],
      ["Verification, ms", fixed(medians.verify, 1)],
      ["Draft step, ms", fixed(medians.draft, 1)],
    ]);
    this.showFormula(rounds);
    this.showDecisions(rounds);
  }

  /** Tokens of an answer by kind, in the legend. */
  showCounts(counts) {
    for (const element of this.counts) element.textContent = counts[element.dataset.kind] ?? 0;
  }

  put(id, entries) {
    const pairs = entries.map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", name), element("dd", value));
      return pair;
    });
    this.find(id).replaceChildren(...pairs);
  }

  showFormula(rounds) {
    const [a, k, length] = [rounds.chance, rounds.meanK, rounds.acceptanceLength];
    if (a === null || k === null || length === null) {
      if (rounds.all.length > 0) this.find("formula").textContent = "";
      return;
    }
    const expected = expectedLength(a, k);
    this.find("formula").textContent =
      `Measured: ${length.toFixed(2)} tokens a round. The formula τ = (1 − a^(K+1)) / (1 − a) says ${expected.toFixed(2)} ` +
      `at the measured chance of acceptance a = ${a.toFixed(3)} and the mean K = ${k.toFixed(2)}: it takes chances to be the ` +
      "same at every token, and K to be the same in every round.";
  }

  showDecisions(rounds) {
    const rows = [...rounds.reasons.values()].map((plan) => {
      const cells = [plan.numRounds, plan.what, plan.reason.replaceAll("_", " "), `${plan.numAccepted} of ${plan.numDrafts}`];
      const row = document.createElement("tr");
      row.append(...cells.map((text) => element("td", text)));
      return row;
    });
    this.find("decisions").replaceChildren(...rows);
  }
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = String(text);
  return made;
}

function fixed(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}
