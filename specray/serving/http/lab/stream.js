// Asks the service and reads its server-sent events.

/** The service is where the page came from, wherever a proxy has put it. */
const base = new URL(".", location.origin + location.pathname.replace(/\/+$/, "")).href;

/** Answers a GET as JSON; raises Error with the service's own message. */
export async function read(path, key) {
  const response = await answered(path, { headers: headersWith(key) });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(problem(body, response.status));
  return body;
}

/**
 * Posts a call and yields its events, decoded. Raises Error with the service's message, also for one that comes
 * in the middle of the stream.
 */
export async function* stream(path, body, key, signal) {
  const response = await answered(path, {
    method: "POST",
    headers: { ...headersWith(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new Error(problem(await response.json().catch(() => ({})), response.status));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the stream ended before the answer did");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (!line.startsWith("data: ")) continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(problem(event, 500));
        yield event;
      }
    }
  } finally {
    // Also where nobody wants more: the service need not go on.
    reader.cancel().catch(() => {});
  }
}

/** The service's response; raises Error with a sentence where there is none. */
function answered(path, options) {
  return fetch(base + path, options).catch((error) => {
    throw error.name === "TypeError" ? new Error("The service does not answer. Is it running?") : error;
  });
}

function headersWith(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function problem(body, status) {
  return body.error?.message ?? `the service answered with status ${status}`;
}
