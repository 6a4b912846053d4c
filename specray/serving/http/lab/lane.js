// One run on a clock of its own: its tokens, its time and its speed. A race has two.

/** A run as it comes, or shown again at the times at which its tokens came. */
export class Lane {
  constructor(element, time, output) {
    this.element = element;
    this.time = time;
    this.output = output;
    this.clear();
  }

  clear() {
    this.output.clear();
    this.element.classList.remove("running");
    this.started = null;
    this.isAgain = false;
    this.endMs = 0;
    this.speed = null;
    this.show(null);
  }

  get isRunning() {
    return this.started !== null;
  }

  /** Starts the clock at now, of performance.now(); ``isAgain`` shows what has come at its own pace. */
  start(now, isAgain = false) {
    this.started = now;
    this.isAgain = isAgain;
    if (isAgain) this.output.rewind();
    this.element.classList.add("running");
    this.show(0);
  }

  add(round, rounds) {
    this.output.add(round, rounds.all.length);
    this.endMs = round.verify.ended_ms;
    this.speed = rounds.tokensPerSecond;
  }

  /** Stops the clock at the last round's end. */
  stop() {
    this.started = null;
    this.output.advance(Infinity);
    this.element.classList.remove("running");
    this.show(this.endMs || null);
  }

  tick(now) {
    if (this.started === null) return;
    const ms = now - this.started;
    if (!this.isAgain) this.show(ms);
    else if (ms >= this.endMs) this.stop();
    else {
      this.output.advance(ms);
      this.show(ms);
    }
  }

  show(ms) {
    const speed = this.speed === null ? "" : `${this.speed.toFixed(1)} tokens/s · `;
    this.time.textContent = ms === null ? "" : `${speed}${(ms / 1e3).toFixed(1)} s`;
  }
}
