// What the console does beyond plain forms: copy, confirm, local times, upload progress, streaming.
// Every page works without this file.
"use strict";

function each(root, selector, act) {
  if (root.matches && root.matches(selector)) act(root);
  root.querySelectorAll(selector).forEach(act);
}

function dress(root) {
  each(root, "[data-copy]", (button) => {
    button.hidden = false;
    button.onclick = async () => {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    };
  });
  each(root, "[data-confirm]", (form) => {
    form.onsubmit = () => window.confirm(form.dataset.confirm);
  });
  each(root, "time[datetime]", (time) => {
    const moment = new Date(time.dateTime);
    time.textContent = moment.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  });
  each(root, "[data-upload]", uploadForm);
  each(root, "[data-playground]", playground);
}

// ---------------------------------------------------------------- upload

function uploadForm(form) {
  const part = (name) => form.querySelector(`[data-upload-${name}]`);
  const config = form.elements["adapter_config.json"];
  const weights = form.elements["adapter_model.safetensors"];
  const drop = form.querySelector("[data-drop]");
  let sending = null;

  drop.querySelector("[data-drop-text]").textContent = "Drop the two files here, or choose them";
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    for (const file of event.dataTransfer.files) {
      const target = file.name.endsWith(".json") ? config : file.name.endsWith(".safetensors") ? weights : null;
      if (!target) { complain(`${file.name} is neither a .json nor a .safetensors file`); continue; }
      const list = new DataTransfer();
      list.items.add(file);
      target.files = list.files;
    }
  };

  function complain(sentence) {
    part("error").textContent = sentence;
    part("error").hidden = !sentence;
  }

  function busy(on) {
    part("progress").hidden = !on;
    part("send").disabled = on;
  }

  async function unreadable() {
    const bytes = config.files[0].size + weights.files[0].size;
    if (bytes > Number(form.dataset.maxBytes)) return "The two files together are larger than the limit below.";
    try {
      JSON.parse(await config.files[0].text());
    } catch {
      return "adapter_config.json is not JSON: is it the file that PEFT saved?";
    }
    return "";
  }

  form.onsubmit = async (event) => {
    event.preventDefault();
    complain(await unreadable());
    if (!part("error").hidden) return;
    const request = (sending = new XMLHttpRequest());
    request.open("POST", form.action);
    request.setRequestHeader("Accept", "application/json");
    request.upload.onprogress = (sent) => {
      const percent = Math.round((100 * sent.loaded) / sent.total);
      form.querySelector("progress").value = percent;
      part("text").textContent = percent < 100 ? `Sending: ${percent} %` : "Sent; the server is storing it";
    };
    request.onload = () => {
      let answer = {};
      try { answer = JSON.parse(request.responseText); } catch { /* not JSON: told below */ }
      if (request.status < 300 && answer.location) { window.location = answer.location; return; }
      busy(false);
      complain(answer.error ? answer.error.message : `The server answered ${request.status}.`);
    };
    request.onerror = () => { busy(false); complain("The connection broke off. Nothing was stored; send it again."); };
    request.onabort = () => { busy(false); complain("Cancelled. Nothing was stored."); };
    part("cancel").onclick = () => sending.abort();
    busy(true);
    request.send(new FormData(form));
  };
}

// ------------------------------------------------------------ playground

function playground(form) {
  const page = form.parentElement;
  const [send, stop, status] = ["send", "stop", "status"].map((name) => form.querySelector(`[data-${name}]`));
  const talk = page.querySelector("[data-talk]");
  const error = page.querySelector("[data-error]");

  function bubble(kind, text) {
    const message = document.createElement("div");
    message.className = `message ${kind}`;
    message.textContent = text;
    talk.append(message);
    return message;
  }

  function busy(on) {
    send.disabled = on;
    stop.hidden = !on;
  }

  form.onsubmit = async (event) => {
    event.preventDefault();
    const asked = new FormData(form);
    const call = {
      model: asked.get("model"),
      messages: [{ role: "user", content: asked.get("prompt") }],
      temperature: Number(asked.get("temperature")),
      max_tokens: Number(asked.get("max_tokens")),
      stream: true,
      stream_options: { include_usage: true },
    };
    const cancel = new AbortController();
    stop.onclick = () => cancel.abort();
    error.hidden = true;
    talk.replaceChildren();
    bubble("user", asked.get("prompt"));
    const answer = bubble("assistant", "");
    busy(true);
    status.textContent = "Waiting for the first token";
    const started = performance.now();
    let tokens = 0;
    try {
      const response = await fetch("/console/playground/stream", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(call),
        signal: cancel.signal,
      });
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const chunk of events(response.body)) {
        if (chunk.error) throw new Error(chunk.error.message);
        for (const choice of chunk.choices) {
          if (choice.delta.content) answer.append(choice.delta.content);
        }
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
        if (answer.textContent && !tokens) status.textContent = "Answering";
      }
      const seconds = (performance.now() - started) / 1000;
      status.textContent = `${tokens} tokens in ${seconds.toFixed(1)} s`;
    } catch (problem) {
      status.textContent = problem.name === "AbortError" ? "Stopped" : "";
      if (problem.name !== "AbortError") { error.textContent = problem.message; error.hidden = false; }
    }
    busy(false);
  };
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

document.addEventListener("DOMContentLoaded", () => dress(document));
document.addEventListener("htmx:afterSwap", (event) => dress(event.detail.elt));
