// Draws the latency histogram above the list of reroutes. Its table says the same without a script.
"use strict";

let steeringPlot;

function drawHistogram() {
  const place = document.getElementById("steering-histogram");
  const source = document.getElementById("steering-histogram-data");
  if (!place || !source || !window.uPlot) return;
  const data = JSON.parse(source.textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = { stroke: colour("--body-quiet-color"), ticks: { show: false } };
  const buckets = data.labels.map((_, number) => number);
  const label = (number) => (number === data.labels.length - 1 ? `over ${data.labels[number - 1]}` : `≤ ${data.labels[number]}`);
  const bars = (name, align, variable) => ({
    label: name, paths: uPlot.paths.bars({ size: [0.4, 28], align }), points: { show: false }, value: (u, count) => count ?? "—",
    stroke: colour(variable), fill: colour(variable), width: 0,
  });
  steeringPlot?.destroy();
  steeringPlot = new uPlot({
    width: place.clientWidth,
    height: 220,
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { time: false, range: [-0.6, buckets.length - 0.4] }, y: { range: (u, low, high) => [0, Math.max(1, high) * 1.1] } },
    axes: [
      {
        ...axis, grid: { show: false }, label: "up to, in ms where no unit is named", size: 30, labelSize: 20, labelFont: "12px sans-serif",
        // Narrow screens have room for every third bound.
        splits: () => buckets.filter((number) => place.clientWidth > 600 || number % 3 === 0),
        values: (u, numbers) => numbers.map((number) => data.labels[number].replace(" ms", "")),
      },
      {
        ...axis, grid: { stroke: colour("--hairline-color"), width: 1 }, size: 46, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
      },
    ],
    series: [
      { label: "Bucket", value: (u, number) => (number == null ? "—" : label(number)) },
      bars("Signal to flip", -1, "--steering-flip"),
      bars("Signal to first byte", 1, "--steering-first-byte"),
    ],
  }, [buckets, data.flip, data.first_byte], place);
}

drawHistogram();
window.addEventListener("resize", drawHistogram, { passive: true });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHistogram);
// The admin's own switch between light and dark.
new MutationObserver(drawHistogram).observe(document.documentElement, { attributeFilter: ["data-theme"] });
