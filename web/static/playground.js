// The playground: one or two answers streamed beside each other, stopped, made again; how likely
// each token was, by pointer or arrow keys. Without this file the form answers on a new page.
"use strict";

const NUMBERS = ["temperature", "max_tokens", "top_p", "seed", "presence_penalty", "frequency_penalty"];
const SHOWN_ALTERNATIVES = 5;

function playground(form) {
  const page = form.parentElement;
  const find = (name) => page.querySelector(`[data-${name}]`);
  const [send, stop, again, status, error, replies] =
    ["send", "stop", "again", "status", "error", "replies"].map(find);
  if (!send) return; // a viewer's page
  find("scripted").hidden = false;
  find("logprobs").onchange = (event) => { find("legend").hidden = !event.target.checked; };
  find("legend").hidden = !find("logprobs").checked; // a browser may keep the switch over a reload
  let last = null;

  function call(model) {
    const asked = new FormData(form);
    const text = (name) => (asked.get(name) || "").trim();
    const messages = [{ role: "user", content: text("prompt") }];
    if (text("system")) messages.unshift({ role: "system", content: text("system") });
    const body = { model, messages, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) if (text(name)) body[name] = Number(text(name));
    const stops = text("stop").split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    if (find("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: SHOWN_ALTERNATIVES });
    return body;
  }

  function panel(model) {
    const made = find("reply-template").content.cloneNode(true).firstElementChild;
    made.querySelector("h2").textContent = model;
    made.setAttribute("aria-label", `Answer of ${model}`);
    made.querySelector(".text").setAttribute("aria-label", `Answer of ${model}; the arrow keys walk through its tokens`);
    walkTokens(made);
    replies.append(made);
    return made;
  }

  async function run(calls) {
    const cancel = new AbortController();
    stop.onclick = () => cancel.abort();
    error.hidden = true;
    if (find("empty")) find("empty").remove();
    replies.replaceChildren();
    send.disabled = true;
    stop.hidden = false;
    again.hidden = true;
    status.textContent = "Waiting for the first token";
    const answered = await Promise.all(calls.map((body) => answerInto(panel(body.model), body, cancel.signal, () => { status.textContent = "Answering"; })));
    status.textContent = cancel.signal.aborted ? "Stopped" : [...new Set(answered)].join(", ");
    send.disabled = false;
    stop.hidden = true;
    again.hidden = false;
  }

  again.onclick = () => run(last);
  form.addEventListener("submit", (event) => {
    if (event.submitter && event.submitter.hasAttribute("data-code")) return;
    event.preventDefault();
    const second = form.elements.model_b.value.trim();
    last = [form.elements.model.value.trim(), ...(second ? [second] : [])].map(call);
    run(last);
  });
}

// Returns how it ended: Done, Refused, Broken off or Stopped.
async function answerInto(panel, body, signal, begun) {
  const [text, figures, error] = [".text", "[data-figures]", ".notice"].map((s) => panel.querySelector(s));
  const started = performance.now();
  const decoder = new TextDecoder();
  let tokens = 0;
  let first = null;
  let stopped = "";
  try {
    const response = await fetch("/console/playground/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (response.redirected) throw new Error("Your session has ended. Sign in again in another tab, then send it again.");
    if (!response.ok) {
      refuse(error, await response.json());
      return "Refused";
    }
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        const entries = choice.logprobs ? choice.logprobs.content : null;
        if (entries) for (const entry of entries) text.append(token(entry, decoder));
        else if (choice.delta.content) text.append(choice.delta.content);
        if (first === null && text.textContent) { first = performance.now() - started; begun(); }
        if (choice.finish_reason) stopped = choice.finish_reason === "length" ? ", cut off at the maximum" : "";
      }
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
    }
    const seconds = (performance.now() - started) / 1000;
    figures.textContent = `${tokens} tokens in ${seconds.toFixed(1)} s, the first after ${Math.round(first || 0)} ms${stopped}`;
  } catch (problem) {
    if (problem.name === "AbortError") { figures.textContent = "Stopped"; return "Stopped"; }
    error.textContent = problem.message;
    error.hidden = false;
    return "Broken off";
  }
  return "Done";
}

// `page`: where somebody goes on, or null.
function refuse(notice, { error, page }) {
  notice.textContent = error.message;
  if (page) {
    const link = document.createElement("a");
    Object.assign(link, { href: page.href, textContent: page.label });
    notice.append(" ", link);
  }
  notice.hidden = false;
}

// ---------------------------------------------------------------- tokens

function token(entry, decoder) {
  const made = document.createElement("span");
  made.className = "token";
  const likely = Math.exp(entry.logprob);
  if (likely < 0.5) made.classList.add(likely < 0.1 ? "rare" : "unsure");
  made.textContent = decoder.decode(new Uint8Array(entry.bytes), { stream: true });
  made.entry = entry;
  return made;
}

function walkTokens(panel) {
  const text = panel.querySelector(".text");
  const detail = panel.querySelector("[data-token]");
  let chosen = null;

  function choose(next) {
    if (!next || !next.entry) return;
    if (chosen) chosen.classList.remove("chosen");
    chosen = next;
    chosen.classList.add("chosen");
    detail.textContent = describe(chosen.entry);
  }
  text.addEventListener("pointerover", (event) => choose(event.target.closest(".token")));
  text.addEventListener("keydown", (event) => {
    const forward = { ArrowRight: true, ArrowLeft: false }[event.key];
    if (forward === undefined) return;
    event.preventDefault();
    if (!chosen) choose(text.querySelector(".token"));
    else choose(forward ? chosen.nextElementSibling : chosen.previousElementSibling);
  });
}

function describe(entry) {
  const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const named = (one) => JSON.stringify(one.token);
  const others = entry.top_logprobs.filter((one) => one.token !== entry.token).map((one) => `${named(one)} ${share(one.logprob)}`);
  return `${named(entry)} ${share(entry.logprob)}${others.length ? `; instead of ${others.join(", ")}` : ""}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-playground]").forEach(playground));
