// What follows from the rounds of one answer. Nothing here touches the page.

/** Sums over rounds as they come. Times are milliseconds since the request arrived at the router. */
export class Rounds {
  constructor() {
    this.all = [];
    this.numTokens = 0;
    this.numDrafts = 0;
    this.numAccepted = 0;
    this.numSpeculative = 0;
    this.numRejections = 0;
    this.numDepth = 0;
    this.reasons = new Map();
  }

  add(round) {
    this.all.push(round);
    this.numTokens += round.tokens.length;
    const depth = depthOf(round);
    if (round.draft.length > 0) {
      this.numSpeculative += 1;
      this.numDrafts += round.draft.length;
      this.numAccepted += round.num_accepted_tokens;
      this.numDepth += depth;
      if (round.num_accepted_tokens < depth) this.numRejections += 1;
    }
    const plan = planOf(round);
    const entry = this.reasons.get(plan.key) ?? { ...plan, numRounds: 0, numDrafts: 0, numAccepted: 0 };
    entry.numRounds += 1;
    entry.numDrafts += round.draft.length;
    entry.numAccepted += round.num_accepted_tokens;
    this.reasons.set(plan.key, entry);
  }

  /** Draft tokens that are part of the output over those that were verified, as the metrics have it. */
  get acceptanceRate() {
    return ratio(this.numAccepted, this.numDrafts);
  }

  /** Tokens of a round with drafts: accepted ones and the target's own, as the metrics have it. */
  get acceptanceLength() {
    return this.numSpeculative ? 1 + this.numAccepted / this.numSpeculative : null;
  }

  /** Chance that a draft token is accepted, given that those before it were. */
  get chance() {
    return ratio(this.numAccepted, this.numAccepted + this.numRejections);
  }

  /** Draft tokens that could have been accepted, per round with drafts. */
  get meanK() {
    return ratio(this.numDepth, this.numSpeculative);
  }

  /** Output tokens a second between the first and the last round's end. */
  get tokensPerSecond() {
    if (this.all.length < 2) return null;
    const [first, last] = [this.all[0], this.all.at(-1)];
    const seconds = (last.verify.ended_ms - first.verify.ended_ms) / 1e3;
    return seconds > 0 ? (this.numTokens - first.tokens.length) / seconds : null;
  }

  /** Median milliseconds of a verification, and of a draft step. */
  get medians() {
    return {
      verify: median(this.all.map((round) => round.verify.forward_ms)),
      draft: median(this.all.flatMap((round) => round.drafting.map((step) => step.forward_ms))),
    };
  }

  /** Looked-up verdicts that the draft had foreseen, over all that were looked up. */
  get hitRate() {
    const looked = this.all.filter((round) => round.lookup !== "");
    return ratio(looked.filter((round) => round.lookup.endsWith("hit")).length, looked.length);
  }
}

/** Expected tokens of a round of K draft tokens, each accepted with chance a: (1 - a^(K+1)) / (1 - a). */
export function expectedLength(a, k) {
  return a >= 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a);
}

export function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}

export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((left, right) => left - right);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Draft tokens on the longest path: all of a chain. */
export function depthOf(round) {
  if (round.parents === null) return round.draft.length;
  const depths = [];
  for (const parent of round.parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(0, ...depths);
}

/** Indices of the draft tokens that are part of the output. */
export function acceptedNodes(round) {
  const nodes = new Set();
  let parent = -1;
  for (let place = 0; place < round.num_accepted_tokens; place += 1) {
    const id = round.tokens[place].id;
    const node = round.draft.findIndex(
      (token, index) => token.id === id && (round.parents ? round.parents[index] : index - 1) === parent,
    );
    if (node < 0) break;
    nodes.add(node);
    parent = node;
  }
  return nodes;
}

function planOf(round) {
  const what =
    round.draft.length === 0
      ? "no draft tokens"
      : `${round.source}${round.overlap === "off" ? "" : `, ${round.overlap}`}, K ${round.num_speculative_tokens || round.draft.length}`;
  return { key: `${what}|${round.reason}`, what, reason: round.reason };
}
