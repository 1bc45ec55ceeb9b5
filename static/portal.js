// The two things that the portal needs a script for: the plot and the copy button.
"use strict";

let plot;

function drawUsage() {
  const place = document.getElementById("usage-plot");
  const source = document.getElementById("usage-data");
  if (!place || !source || !window.uPlot) return;
  const data = JSON.parse(source.textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: colour("--apex-quiet"), grid: { stroke: colour("--apex-line"), width: 1 }, ticks: { show: false } };
  plot?.destroy();
  plot = new uPlot({
    width: place.clientWidth,
    height: 220,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    scales: { x: { time: true }, tokens: { range: (u, low, high) => [0, Math.max(1, high) * 1.1] }, cost: { range: (u, low, high) => [0, (high || 0.01) * 1.1] } },
    axes: [axis, { ...axis, scale: "tokens", size: 70 }, { ...axis, scale: "cost", side: 1, size: 80, grid: { show: false } }],
    series: [
      { label: "Day", value: "{YYYY}-{MM}-{DD}" },
      { label: "Tokens", scale: "tokens", stroke: colour("--apex-good"), fill: colour("--apex-good-back"), width: 2, paths: uPlot.paths.bars({ size: [0.7, 40] }), points: { show: false } },
      { label: `Cost (${data.currency})`, scale: "cost", stroke: colour("--apex-warn"), width: 2, points: { show: false } },
    ],
  }, [data.days, data.tokens, data.cost], place);
}

function wireCopyButtons() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const field = document.getElementById(button.dataset.copy);
      field.select();
      const said = document.getElementById(`${button.dataset.copy}-copied`);
      try {
        await navigator.clipboard.writeText(field.value);
        said.textContent = "Copied.";
      } catch {
        said.textContent = "Your browser does not let us copy: the key is selected, press Ctrl+C or ⌘C.";
      }
    });
  }
}

drawUsage();
window.addEventListener("resize", drawUsage, { passive: true });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawUsage);
wireCopyButtons();
