// What the form asks for: examples, values beside the sliders, and the call that it describes.

const METHODS = {
  auto: {},
  model: { draft: "model" },
  ngram: { draft: "ngram" },
  none: { enabled: false },
};
const EXAMPLES = {
  chat: {
    "A question": "Why is the sky blue? Answer in three sentences.",
    Code: "Write a Python function that says whether a word is a palindrome, with a docstring.",
    "An edit":
      "Rename `n` to `count` and repeat the function:\n\ndef mean(values):\n    n = len(values)\n" +
      "    if n == 0:\n        return 0.0\n    return sum(values) / n",
  },
  completion: {
    "A function": "def fibonacci(n):\n",
    "A class": "class Stack:\n    def __init__(self):\n",
    "A story": "Once upon a time there was a river that",
  },
};

/** The form's fields; ``find`` gives an element by its id. */
export class Form {
  constructor(find) {
    this.find = find;
    for (const id of ["k", "temperature"]) find(id).addEventListener("input", () => this.show());
    for (const input of document.querySelectorAll("[name=method]")) input.addEventListener("change", () => this.show());
    for (const id of ["kind-chat", "kind-completion"]) find(id).addEventListener("change", () => this.showExamples());
    this.show();
    this.showExamples();
  }

  get kind() {
    return this.find("kind-chat").checked ? "chat" : "completion";
  }

  get method() {
    return document.querySelector("[name=method]:checked").value;
  }

  get key() {
    return this.find("key").value;
  }

  get temperature() {
    return Number(this.find("temperature").value);
  }

  /** Chats, where the model has a template for them. */
  allowChat(isAllowed) {
    this.find("kind-chat").disabled = !isAllowed;
    this.find(isAllowed ? "kind-chat" : "kind-completion").checked = true;
    this.showExamples();
  }

  show() {
    const k = Number(this.find("k").value);
    this.find("k").disabled = this.method === "none";
    this.find("k-value").textContent = k === 0 ? "auto" : String(k);
    this.find("k").setAttribute("aria-valuetext", k === 0 ? "chosen by the service" : String(k));
    this.find("temperature-value").textContent = this.temperature.toFixed(1);
  }

  showExamples() {
    const prompt = this.find("prompt");
    const known = Object.values(EXAMPLES).flatMap((examples) => Object.values(examples));
    const examples = Object.entries(EXAMPLES[this.kind]);
    if (prompt.value === "" || known.includes(prompt.value)) prompt.value = examples[0][1];
    const buttons = examples.map(([name, text]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", () => {
        prompt.value = text;
      });
      return button;
    });
    this.find("examples").replaceChildren(...buttons);
  }

  /** Path and body of the call, with drafts by one of METHODS. */
  call(model, method) {
    const k = Number(this.find("k").value);
    const speculation = { ...METHODS[method] };
    if (k > 0 && method !== "none") speculation.num_speculative_tokens = k;
    // Rejection tells the draft's probabilities; without randomness there are none to tell.
    if (this.temperature > 0) speculation.verification = "rejection";
    const body = {
      model,
      max_tokens: Number(this.find("max-tokens").value),
      temperature: this.temperature,
      seed: Number(this.find("seed").value),
      stream: true,
      stream_options: { include_speculation: true, include_usage: true },
      return_speculation_metrics: true,
      speculation,
    };
    const prompt = this.find("prompt").value;
    if (this.kind === "completion") return ["v1/completions", { ...body, prompt, logprobs: 0 }];
    return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }], logprobs: true }];
  }
}
