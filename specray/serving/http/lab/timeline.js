// Steps of draft and target as bars on one clock, which moves while they come.

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_MS = 2000;
const ROWS_HEIGHT = 84;
const HEIGHT = 102;

/** Draws rounds into an element that scrolls; ``whole`` is the checkbox that fits a run into its width. */
export class Timeline {
  constructor(element, rows, whole) {
    this.element = element;
    this.rows = rows;
    this.whole = whole;
    this.svg = make("svg", { height: HEIGHT, role: "img", "aria-label": "Steps of draft and target" });
    element.append(this.svg);
    this.clear(false);
    whole.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(element);
  }

  /** Empties it; a race has a row more, for the target alone. */
  clear(isRace) {
    this.names = isRace ? ["Target alone", "Draft", "Target"] : ["Draft", "Target"];
    this.steps = [];
    this.started = null;
    this.rows.replaceChildren(
      ...this.names.map((name) => {
        const item = document.createElement("li");
        item.textContent = name;
        return item;
      }),
    );
    this.draw();
  }

  /** Starts the clock; what was drawn before comes again at its time. */
  start(now) {
    this.started = now;
    this.whole.checked = false;
    this.draw();
  }

  add(round, isAlone) {
    const steps = stepsOf(round, this.names, isAlone);
    this.steps.push(...steps);
    for (const step of steps) this.svg.append(...this.bar(step));
  }

  /** Moves the clock's time to the right edge: what lies behind it is out of sight. */
  tick(now) {
    if (this.started === null) return;
    const ms = now - this.started;
    if (ms > this.widthMs) this.widen(ms + WINDOW_MS);
    this.svg.style.transform = `translateX(${this.element.clientWidth - ms * this.scale}px)`;
  }

  /** Stops the clock; ``isWhole``: shows all that came, side by side. */
  stop(isWhole) {
    this.started = null;
    this.whole.checked = isWhole;
    this.draw();
  }

  draw() {
    const end = Math.max(100, ...this.steps.map((step) => step.ended_ms));
    const width = Math.max(200, this.element.clientWidth);
    const isMoving = this.started !== null;
    this.scale = width / (this.whole.checked ? end : WINDOW_MS);
    this.whole.disabled = isMoving;
    this.gridMs = 0;
    this.svg.replaceChildren();
    if (isMoving || this.steps.length > 0) this.widen(end);
    else this.svg.setAttribute("width", width);
    for (const step of this.steps) this.svg.append(...this.bar(step));
    this.element.classList.toggle("moving", isMoving);
    this.svg.style.transform = "none";
    this.element.scrollLeft = isMoving ? 0 : this.element.scrollWidth;
    if (isMoving) this.tick(performance.now());
  }

  /** Makes room and the lines of the grid up to a time. */
  widen(ms) {
    this.widthMs = ms;
    this.svg.setAttribute("width", Math.max(this.element.clientWidth, Math.floor(ms * this.scale)));
    const wish = 110 / this.scale;
    const step = [100, 200, 500, 1000, 2000, 5000, 10000, 20000].find((size) => size >= wish) ?? 50000;
    for (; this.gridMs <= ms; this.gridMs += step) {
      const x = this.gridMs * this.scale;
      this.svg.prepend(make("line", { class: "grid", x1: x, x2: x, y1: 0, y2: ROWS_HEIGHT }));
      this.svg.append(make("text", { x: x + 4, y: HEIGHT - 3 }, `${this.gridMs / 1000} s`));
    }
  }

  *bar(step) {
    const height = ROWS_HEIGHT / this.names.length - 10;
    const y = (step.row * ROWS_HEIGHT) / this.names.length + 6;
    const workFrom = Math.max(step.ended_ms - step.forward_ms, step.started_ms);
    yield this.rect(step, `${step.kind} way`, step.started_ms, y, height);
    yield this.rect(step, step.kind, workFrom, y, height);
    if (step.lookup) {
      const kind = step.lookup.endsWith("hit") ? "hit" : "miss";
      yield make("circle", { class: kind, cx: step.started_ms * this.scale, cy: y - 2, r: 3 });
    }
  }

  rect(step, kind, from, y, height) {
    const width = Math.max(1, (step.ended_ms - from) * this.scale - 1);
    const element = make("rect", { class: kind, x: from * this.scale, y, width, height, rx: 2 });
    element.append(make("title", {}, `${step.title}: ${step.started_ms.toFixed(1)} to ${step.ended_ms.toFixed(1)} ms`));
    return element;
  }
}

function stepsOf(round, names, isAlone) {
  const target = isAlone ? 0 : names.indexOf("Target");
  const title = `${round.num_accepted_tokens} of ${round.draft.length} draft tokens accepted`;
  return [
    ...round.drafting.map((step) => ({ ...step, row: names.indexOf("Draft"), kind: "draft", title: "draft step" })),
    { ...round.verify, row: target, kind: "target", lookup: round.lookup, title },
  ];
}

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
