// What every page does beyond plain forms: copy, local times. upload.js and playground.js add theirs.
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
  each(root, "time[datetime]", (time) => {
    const moment = new Date(time.dateTime);
    time.textContent = moment.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  });
}

document.addEventListener("DOMContentLoaded", () => {
  dress(document);
  const here = document.querySelector(".side [aria-current]");
  if (here) here.scrollIntoView({ block: "nearest", inline: "center" });
});
document.addEventListener("htmx:load", (event) => dress(event.detail.elt));
// A part of a page that renews itself waits while a question in it is open, or the answer would go
// with it. One that is asked for after the session has ended is the sign-in page: go there.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.querySelector("details.ask[open]")) {
    event.detail.shouldSwap = false;
    return;
  }
  if (new URL(event.detail.xhr.responseURL).pathname !== "/console/sign-in") return;
  event.detail.shouldSwap = false;
  window.location.reload();
});
