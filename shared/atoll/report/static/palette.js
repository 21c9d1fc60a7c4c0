/* Colours by place: eight that colour-blind people can tell apart; from the ninth on the same ones again, dashed. */

const DASHES = [null, [6, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;
export const GROUPS = {
  fault: { sign: "▼", colour: "var(--fault)", word: "fault" },
  recovery: { sign: "▲", colour: "var(--recovery)", word: "recovery" },
  change: { sign: "●", colour: "var(--change)", word: "change" },
};
export const PHASES = [
  { name: "waits for the quorum", colour: "var(--c0)" },
  { name: "grace", colour: "var(--c1)" },
  { name: "queued", colour: "var(--c7)" },
  { name: "merge", colour: "var(--c3)" },
  { name: "commit", colour: "var(--c2)" },
];

export function style(place) {
  return { colour: `var(--c${place % COLOURS})`, dash: DASHES[Math.floor(place / COLOURS) % DASHES.length] };
}

/* A canvas knows no custom properties: the colour that one has at this moment. */
export function resolved(colour) {
  const probe = document.createElement("i");
  probe.style.color = colour;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const listeners = new Set();
export function onTheme(listener) { listeners.add(listener); }

export function followTheme(select) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const tell = () => { for (const listener of listeners) listener(); };
  const use = (chosen) => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    tell();
  };
  let kept = "auto";
  try { kept = localStorage.getItem("atoll-theme") ?? "auto"; } catch { /* a browser that keeps nothing */ }
  select.value = ["auto", "light", "dark"].includes(kept) ? kept : "auto";
  use(select.value);
  select.addEventListener("change", () => {
    try { localStorage.setItem("atoll-theme", select.value); } catch { /* as above */ }
    use(select.value);
  });
  system.addEventListener("change", tell);
}
