// Steps of draft and target as bars on one clock.

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_MS = 2000;
const LANES = { draft: 30, target: 84 };
const HEIGHT = 34;
const LEFT = 52;

/** Draws the rounds into an SVG; its width is that of the page. */
export class Timeline {
  constructor(svg, follow) {
    this.svg = svg;
    this.follow = follow;
    this.rounds = [];
    this.isDue = false;
    follow.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  clear() {
    this.rounds = [];
    this.draw();
  }

  add(round) {
    this.rounds.push(round);
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  draw() {
    const width = Math.max(240, this.svg.clientWidth);
    const steps = this.rounds.flatMap(stepsOf);
    const end = Math.max(1, ...steps.map((step) => step.ended_ms));
    const start = this.follow.checked ? Math.max(0, end - WINDOW_MS) : 0;
    const x = (ms) => LEFT + ((ms - start) / (end - start)) * (width - LEFT - 12);
    const parts = [...grid(start, end, x)];
    for (const step of steps) if (step.ended_ms > start) parts.push(...bar(step, start, x));
    for (const [lane, y] of Object.entries(LANES)) {
      parts.push(make("text", { x: 4, y: y + HEIGHT / 2 + 4 }, lane));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} 160`);
    this.svg.replaceChildren(...parts);
  }
}

function stepsOf(round) {
  return [
    ...round.drafting.map((step) => ({ ...step, lane: "draft", title: "draft step" })),
    {
      ...round.verify,
      lane: "target",
      lookup: round.lookup,
      title: `${round.num_accepted_tokens} of ${round.draft.length} draft tokens accepted`,
    },
  ];
}

function* grid(start, end, x) {
  const wish = (end - start) / 6;
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((size) => size >= wish) ?? 10000;
  for (let ms = Math.ceil(start / step) * step; ms <= end; ms += step) {
    yield make("line", { class: "grid", x1: x(ms), x2: x(ms), y1: 8, y2: 128 });
    yield make("text", { x: x(ms), y: 146, "text-anchor": "middle" }, String(ms));
  }
}

function* bar(step, start, x) {
  const y = LANES[step.lane];
  const from = Math.max(start, step.started_ms);
  const workFrom = Math.max(start, step.ended_ms - step.forward_ms, step.started_ms);
  const title = `${step.title}: ${step.started_ms.toFixed(1)} to ${step.ended_ms.toFixed(1)} ms`;
  yield rect(`${step.lane} way`, x(from), y, x(step.ended_ms) - x(from), title);
  yield rect(step.lane, x(workFrom), y, x(step.ended_ms) - x(workFrom), title);
  if (step.lookup) {
    const kind = step.lookup.endsWith("hit") ? "hit" : "miss";
    yield make("circle", { class: kind, cx: x(from), cy: LANES.target - 9, r: 4 });
  }
}

function rect(kind, x, y, width, title) {
  const element = make("rect", { class: kind, x, y, width: Math.max(1, width), height: HEIGHT, rx: 2 });
  element.append(make("title", {}, title));
  return element;
}

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
