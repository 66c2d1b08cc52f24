// Uploads an adapter in parts: checked before a byte is sent, resumed after a broken connection or
// a closed page, cancelled for good. Without this file the form sends both files in one go.
"use strict";

const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;
const MAX_HEADER_BYTES = 1024 * 1024;
const TRIES = 5;
// What training scripts and PEFT itself call every adapter's folder or file.
const EVERYBODYS = /^(adapter|adapter[_-]model|checkpoint[_-]?\d*|output|outputs|results?|final([_-]\w+)?|lora|peft|model|runs?|tmp|out|\d+)$/;
const REFUSED = { use_dora: "DoRA", use_qalora: "QA-LoRA", trainable_token_indices: "trained token rows" };

function uploadForm(form) {
  const part = (name) => form.querySelector(`[data-upload-${name}]`);
  const config = form.elements["adapter_config.json"];
  const weights = form.elements["adapter_model.safetensors"];
  const drop = form.querySelector("[data-drop]");
  const both = part("both").querySelector("input");
  let cancel = null;

  // One chooser stands in for the two fields, which are those of a page without this file.
  drop.querySelector(".files").hidden = true;
  for (const field of [config, weights]) field.required = false;
  part("both").hidden = false;
  part("chosen").hidden = false;
  if (config.hasAttribute("aria-invalid") || weights.hasAttribute("aria-invalid")) both.setAttribute("aria-invalid", "true");

  both.onchange = () => take([...both.files]);
  both.onclick = () => { both.value = ""; }; // the same files, changed meanwhile, are a choice too
  both.oncancel = showChosen;
  drop.querySelector("[data-drop-text]").textContent = "Drop the two files or their folder here, or choose them";
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const { folder, files } = await dropped(event.dataTransfer);
    take(files, folder);
  };

  // Sorts files into the two fields; chosen one after the other they add up.
  function take(files, folder = "") {
    for (const file of files) {
      const target = { "adapter_config.json": config, "adapter_model.safetensors": weights }[file.name]
        || (/\.(safetensors|bin)$/.test(file.name) ? weights : null);
      if (!target) continue;
      target.files = list([file]);
    }
    const chosen = showChosen();
    const weighed = weights.files.length ? weights.files[0].name.replace(/\.[a-z]+$/, "") : "";
    if (!form.elements.name.value) form.elements.name.value = proposed(folder) || proposed(weighed);
    complain(chosen.length ? missing() : "Among these there is no adapter_config.json and no adapter_model.safetensors; choose both.");
  }

  // What is chosen, in the chooser too when it was dropped or came one by one.
  function showChosen() {
    const chosen = [config, weights].map((field) => field.files[0]).filter(Boolean);
    both.files = list(chosen);
    part("chosen").textContent = chosen.map((file) => `${file.name} (${size(file.size)})`).join(", ");
    return chosen;
  }

  function missing() {
    if (!config.files.length) return "adapter_config.json is missing; it lies beside the weights that PEFT saved.";
    if (!weights.files.length) return "adapter_model.safetensors is missing; it lies beside the config that PEFT saved.";
    return "";
  }

  function complain(sentence) {
    part("error").textContent = sentence;
    part("error").hidden = !sentence;
  }

  function busy(on) {
    part("progress").hidden = !on;
    part("send").disabled = on;
  }

  function show(sent, total, text) {
    form.querySelector("progress").value = total ? Math.round((100 * sent) / total) : 0;
    part("text").textContent = text || `Sent ${mebibytes(sent)} of ${mebibytes(total)}`;
  }

  form.onsubmit = async (event) => {
    event.preventDefault();
    complain(missing());
    if (!part("error").hidden) return;
    const files = { name: form.elements.name.value.trim(), config: config.files[0], weights: weights.files[0] };
    complain(await problemOf(files, Number(form.dataset.maxBytes)));
    if (!part("error").hidden) return;
    cancel = new AbortController();
    part("cancel").onclick = () => cancel.abort();
    busy(true);
    try {
      window.location = await send(files, cancel.signal, show);
    } catch (problem) {
      busy(false);
      complain(problem.name === "AbortError"
        ? "Cancelled. What was sent is thrown away."
        : problem.message);
    }
  };
}

function list(files) {
  const made = new DataTransfer();
  for (const file of files) made.items.add(file);
  return made.files;
}

// A name from what the folder or the weights are called, "" where that names no adapter.
function proposed(text) {
  const name = text.trim().toLowerCase().replace(/\s+/g, "-");
  return NAME.test(name) && !name.includes("..") && !EVERYBODYS.test(name) ? name : "";
}

// Files of a drop, also those in a folder that was dropped, and what that folder is called.
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry());
  const found = [...transfer.files].filter((_, index) => !entries[index] || entries[index].isFile);
  const folders = entries.filter((one) => one && one.isDirectory);
  for (const entry of folders) {
    const inside = await new Promise((done, fail) => entry.createReader().readEntries(done, fail));
    for (const file of inside.filter((one) => one.isFile)) {
      found.push(await new Promise((done, fail) => file.file(done, fail)));
    }
  }
  return { folder: folders.length === 1 ? folders[0].name : "", files: found };
}

// ----------------------------------------------------- before a byte is sent

async function problemOf({ name, config, weights }, maxBytes) {
  if (!NAME.test(name) || name.includes("..")) {
    return "The name may have lower-case letters, digits, dot, dash and underscore, and begins with a letter or digit.";
  }
  if (config.size + weights.size > maxBytes) return "The two files together are larger than the limit below.";
  return (await configProblem(config)) || weightsProblem(weights);
}

async function configProblem(file) {
  let config;
  try {
    config = JSON.parse(await file.text());
  } catch (problem) {
    if (problem.name === "NotReadableError") return "adapter_config.json was changed after it was chosen; choose it again.";
    return "adapter_config.json is not JSON: is it the file that PEFT saved?";
  }
  if (config === null || typeof config !== "object" || Array.isArray(config)) {
    return "adapter_config.json is not one JSON object: is it the file that PEFT saved?";
  }
  if (config.peft_type !== "LORA") {
    return `adapter_config.json has peft_type ${JSON.stringify(config.peft_type)}; only LORA is served.`;
  }
  if (!Number.isInteger(config.r) || config.r < 1) {
    return `adapter_config.json has r ${JSON.stringify(config.r)}; a rank is a whole number from 1.`;
  }
  const refused = Object.keys(REFUSED).find((key) => config[key]);
  if (refused) return `adapter_config.json has ${refused}: ${REFUSED[refused]} is not served. Train without it.`;
  return "";
}

async function weightsProblem(file) {
  const start = new Uint8Array(await file.slice(0, 64).arrayBuffer());
  const text = new TextDecoder("latin1").decode(start);
  if (text.startsWith("PK")) return "The weights are a pickle (.bin); save them again with safe_serialization=True.";
  if (text.startsWith("version https://git-lfs")) return "The weights are a git-LFS pointer, not the file; run git lfs pull.";
  if (file.size < 8) return "The weights are no safetensors file: it is too short.";
  const length = Number(new DataView(start.buffer).getBigUint64(0, true));
  if (length > MAX_HEADER_BYTES || 8 + length > file.size) {
    return "The weights are no safetensors file, or it is cut off: its header does not fit.";
  }
  let header;
  try {
    header = JSON.parse(await file.slice(8, 8 + length).text());
  } catch {
    return "The weights are no safetensors file: its header is not JSON.";
  }
  const tensors = Object.entries(header).filter(([key]) => key !== "__metadata__");
  if (!tensors.length) return "The weights hold no tensor.";
  if (!tensors.some(([key]) => key.includes("lora_"))) return "No tensor of the weights is a LoRA factor: is it the adapter's file, or the whole model's?";
  const ends = Math.max(...tensors.map(([, one]) => (one.data_offsets || [0, 0])[1]));
  if (8 + length + ends !== file.size) {
    return `The weights have ${file.size.toLocaleString()} bytes and their header says ${(8 + length + ends).toLocaleString()}: the file is cut off or was changed.`;
  }
  return "";
}

// ------------------------------------------------------------------ in parts

// Sends what the server does not have yet, and returns the address of the new version's page.
async function send({ name, config, weights }, signal, show) {
  const total = config.size + weights.size;
  // Not cancelled half-way: what the server began must be known to be thrown away.
  const upload = (await begun(name, config, weights)) || (await call("POST", "/console/uploads", undefined, {
    name, config_bytes: config.size, weights_bytes: weights.size,
  }));
  const piece = (number) => (number === 0 ? config
    : weights.slice((number - 1) * upload.part_bytes, number * upload.part_bytes));
  try {
    const received = new Map(upload.received.map((one) => [one.number, one]));
    let sent = 0;
    signal.throwIfAborted();
    for (let number = 0; number <= upload.parts; number += 1) {
      const data = piece(number);
      const there = received.get(number);
      if (!there || there.sha256 !== (await sha256(data))) {
        await sendPart(`/console/uploads/${upload.id}/parts/${number}`, data, signal, (loaded) => show(sent + loaded, total), show);
      }
      sent += data.size;
      show(sent, total);
    }
    show(total, total, "Sent; the server is storing it");
    return (await call("POST", `/console/uploads/${upload.id}/complete`, signal)).location;
  } catch (problem) {
    if (problem.name === "AbortError") await fetch(`/console/uploads/${upload.id}`, { method: "DELETE" });
    else if (problem.again) problem.message += " What was sent is kept for a while: send the same files again to go on.";
    throw problem;
  }
}

// An upload of the same name and sizes that waits for parts: its parts are compared by hash.
async function begun(name, config, weights) {
  const open = (await call("GET", "/console/uploads")).data;
  return open.find((one) => one.name === name && one.config_bytes === config.size && one.weights_bytes === weights.size);
}

async function sendPart(address, data, signal, progress, show) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      await put(address, data, signal, progress);
      return;
    } catch (problem) {
      if (!problem.again || attempt === TRIES) throw problem;
      show(0, 0, `The connection broke off; trying again (${attempt} of ${TRIES - 1})`);
      await new Promise((done) => setTimeout(done, 500 * 2 ** attempt));
      if (signal.aborted) throw signal.reason;
    }
  }
}

function put(address, data, signal, progress) {
  signal.throwIfAborted();
  return new Promise((done, fail) => {
    const request = new XMLHttpRequest();
    request.open("PUT", address);
    request.upload.onprogress = (event) => progress(event.loaded);
    request.onload = () => {
      if (request.status < 300 && request.responseURL.endsWith(address)) done();
      else fail(refusal(request.status, request.responseText));
    };
    request.onerror = () => fail(Object.assign(new Error("The connection broke off."), { again: true }));
    request.onabort = () => fail(signal.reason);
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(data);
  });
}

async function call(method, address, signal, body) {
  let response;
  try {
    response = await fetch(address, {
      method,
      signal,
      headers: body ? { "Content-Type": "application/json" } : {},
      body: body ? JSON.stringify(body) : undefined,
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw Object.assign(new Error("The server cannot be reached."), { again: true });
  }
  if (response.redirected) throw new Error("Your session has ended. Sign in again in another tab, then send the same files again.");
  const text = await response.text();
  if (!response.ok) throw refusal(response.status, text);
  return JSON.parse(text);
}

function refusal(status, text) {
  let message = `The server answered ${status}.`;
  try { message = JSON.parse(text).error.message; } catch { /* not JSON: the status says it */ }
  return Object.assign(new Error(message), { again: status >= 500 || status === 408 || status === 429 });
}

async function sha256(data) {
  const digest = await crypto.subtle.digest("SHA-256", await data.arrayBuffer());
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function size(bytes) {
  return bytes < 1048576 ? `${(bytes / 1024).toFixed(1)} KiB` : mebibytes(bytes);
}

function mebibytes(bytes) {
  return `${(bytes / 1048576).toFixed(1)} MiB`;
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-upload]").forEach(uploadForm));
