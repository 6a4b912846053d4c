// The same prompt without and with drafts: one after the other, then both again on one clock.

const TICK_MS = 40;

/** Texts with the milliseconds at which their pieces came. */
export class Race {
  constructor(find) {
    this.find = find;
    this.runs = { off: [], on: [] };
    this.timer = null;
    find("replay").addEventListener("click", () => this.replay());
  }

  clear() {
    clearInterval(this.timer);
    this.runs = { off: [], on: [] };
    for (const name of ["off-text", "on-text", "off-speed", "on-speed", "race-result"]) {
      this.find(name).textContent = "";
    }
    this.find("race-section").hidden = false;
    this.find("replay").disabled = true;
  }

  add(arm, text, ms) {
    this.runs[arm].push({ text, ms });
    this.find(`${arm}-text`).append(text);
  }

  end(arm, rounds) {
    const speed = rounds.tokensPerSecond;
    this.find(`${arm}-speed`).textContent = speed === null ? "" : `${speed.toFixed(1)} tokens/s`;
  }

  /** Compares both; with ``isSampled`` the draft decides which random draws count. */
  finish(off, on, isSampled) {
    const [plain, drafted] = [off.tokensPerSecond, on.tokensPerSecond];
    const isSame = text(this.runs.off) === text(this.runs.on);
    const faster = plain && drafted ? `${(drafted / plain).toFixed(2)} times as fast with drafts. ` : "";
    const other = isSampled
      ? "The texts differ: under rejection drafts change which draws count, not their probabilities."
      : "The texts differ: in bfloat16 the width of a forward decides near ties.";
    this.find("race-result").textContent = faster + (isSame ? "Both texts are the same." : other);
    this.find("replay").disabled = false;
    this.replay();
  }

  replay() {
    clearInterval(this.timer);
    const started = performance.now();
    const show = () => {
      const ms = performance.now() - started;
      for (const arm of ["off", "on"]) {
        this.find(`${arm}-text`).textContent = text(this.runs[arm].filter((piece) => piece.ms <= ms));
      }
      const last = Math.max(...[...this.runs.off, ...this.runs.on].map((piece) => piece.ms));
      if (ms > last) clearInterval(this.timer);
    };
    this.timer = setInterval(show, TICK_MS);
    show();
  }
}

function text(pieces) {
  return pieces.map((piece) => piece.text).join("");
}
