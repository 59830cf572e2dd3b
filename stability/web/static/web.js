"use strict";
// The form: search, copy, sliders, files, the place of a mistake. Figures: drawn from JSON, again when a file has grown.
document.documentElement.classList.remove("no-js");
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const byId = id => document.getElementById(id);

document.addEventListener("input", event => {
  const box = event.target;
  if (box.id === "search") {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    all("#fields details").forEach(section => {
      const rows = all(".row", section);
      rows.forEach(row => { row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word)); });
      section.hidden = rows.every(row => row.hidden);
      if (words.length && !section.hidden) section.open = true;
    });
    event.stopPropagation();
  }
  if (box.dataset.logOf) {
    byId(box.dataset.logOf).value = Number((10 ** box.value).toPrecision(2)).toExponential();
  }
}, true);

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
  button.textContent = "Copied";
});

document.addEventListener("change", async event => {
  const into = event.target.dataset.into;
  if (into && event.target.files[0]) byId(into).value = await event.target.files[0].text();
});

// a new form keeps which sections are open; one that lacks a word typed since it was asked for is asked for again
let open = {}, sent = "";
const typed = () => `${new URLSearchParams(new FormData(byId("compose")))}`;
document.addEventListener("htmx:beforeRequest", () => { sent = typed(); });
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  all("#compose details").forEach(each => { open[each.id] = each.open; });
  if (detail.target.id === "compose" && typed() !== sent) { detail.shouldSwap = false; htmx.trigger("#compose", "change"); }
});
document.addEventListener("htmx:afterSwap", () => {
  all("#compose details").forEach(each => { if (each.id in open) each.open = each.open || open[each.id]; });
  const problem = byId("problem");
  if (!problem) return;
  all("#fields .error").forEach(each => { each.textContent = ""; });
  all("#fields [aria-invalid]").forEach(each => each.removeAttribute("aria-invalid"));
  const found = [problem, ...all("#plan [data-key]")].find(each => each.dataset.key && each.textContent);
  const key = found && found.dataset.key;
  if (!key || !byId(`e-${key}`)) return;
  byId(`e-${key}`).textContent = found.textContent.replace(/^error: /, "");
  const input = byId(`f-${key}`);
  if (input) input.setAttribute("aria-invalid", "true");
});

const place = document.querySelector("[data-figures]");
async function draw() {
  const answer = await fetch(place.dataset.figures);
  if (!answer.ok) return;
  const figures = await answer.json();
  const divs = Object.keys(figures).map(byId).filter(Boolean);
  divs.forEach(div => { div.closest("figure").hidden = false; });
  for (const div of divs) {
    // no button that sends a figure's data to plotly's makers
    await Plotly.react(div, figures[div.id].data, figures[div.id].layout, { responsive: true, displaylogo: false, showSendToCloud: false });
    if (div._fullLayout.width !== div.clientWidth) await Plotly.Plots.resize(div);  // a figure has come beside it
  }
}

if (place) {
  let busy = false, again = false;
  const label = e => e.getAttribute("aria-label") || e.href || (e.tagName === "PRE" ? e.previousElementSibling : e).textContent;
  const renew = (live, text) => {  // new text keeps the focus, and what is scrolled stays there
    const parts = () => all("a, button, [tabindex]", live), focused = document.activeElement;
    const before = new Map(parts().map(e => [label(e), [e === focused, e.scrollLeft, e.scrollTop]]));
    live.innerHTML = text;
    parts().forEach(e => {
      const [hadFocus, left, top] = before.get(label(e)) || [];
      if (left || top) e.scrollTo(left, top);
      if (hadFocus) e.focus({ preventScroll: true });
    });
  };
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      await draw();
      if (place.dataset.live) {
        const answer = await fetch(place.dataset.live);
        const text = await answer.text(), live = byId("live");
        if (answer.ok && !live.querySelector(":active")) renew(live, text);  // a pressed control stays where it is
      }
    } finally {
      busy = false;
      if (again) { again = false; setTimeout(refresh, 500); }
    }
  };
  refresh();
  const stream = new EventSource(place.dataset.events);
  stream.addEventListener("rows", refresh);
  for (const name of ["open", "error"]) stream.addEventListener(name, () => { byId("lost").hidden = name === "open"; });
}
