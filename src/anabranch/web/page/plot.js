/** Two small plots over the last minutes, as SVG with a text that says the same. */
import { count, duration, h, svg } from "./dom.js";

const WIDTH = 160;
const HEIGHT = 36;
const PAD = 3;
// A line is not drawn across more minutes than these without a call.
const GAP_MINUTES = 5;

const plot = (text, ...shapes) =>
  svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", role: "img", "aria-label": text, preserveAspectRatio: "none" }, ...shapes);

const base = () => svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, class: "plot-base" });

/** Where each minute lies: the newest one is at the right. */
function placed(history, minutes, now) {
  const newest = Math.floor(now / 60_000);
  return history
    .map((one) => ({ ...one, back: newest - Math.floor(new Date(one.minute).getTime() / 60_000) }))
    .filter(({ back }) => back >= 0 && back < minutes)
    .map((one) => ({ ...one, x: WIDTH - ((one.back + 0.5) * WIDTH) / minutes }));
}

function line(points, kind) {
  const runs = [];
  points.forEach((point, index) => {
    if (index && points[index - 1].back - point.back <= GAP_MINUTES) runs[runs.length - 1].push(point);
    else runs.push([point]);
  });
  return runs.map((run) => {
    // A single minute is a dot: a line without length, with round ends.
    const drawn = run.length > 1 ? run : [run[0], run[0]];
    return svg("polyline", { points: drawn.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "), class: run.length > 1 ? kind : `${kind} single`, "vector-effect": "non-scaling-stroke" });
  });
}

function figure(title, shown, drawing) {
  return h("figure", { class: "figure" }, drawing, h("figcaption", null, h("span", { class: "figure-title" }, title), " ", shown));
}

/** The latency of calls per minute: the median as a line, the 95th percentile as a thin one. */
export function latencyPlot(history, minutes, now = Date.now()) {
  const points = placed(history, minutes, now).filter((one) => typeof one.p50_ms === "number");
  if (!points.length) return figure("Latency", "no calls", plot(`Latency: no calls in the last ${minutes} minutes.`, base()));
  const most = Math.max(1, ...points.map((one) => one.p95_ms ?? one.p50_ms));
  // Some room above, so that a line at its highest is not taken for a border.
  const y = (ms) => HEIGHT - PAD - (ms / (1.25 * most)) * (HEIGHT - 2 * PAD);
  const last = points[points.length - 1];
  const text = `Latency in the last ${minutes} minutes: latest median ${duration(last.p50_ms)}, highest 95th percentile ${duration(most)}.`;
  return figure(
    "Latency",
    `${duration(last.p50_ms)}, p95 up to ${duration(most)}`,
    plot(
      text,
      base(),
      line(points.map((one) => ({ ...one, y: y(one.p95_ms ?? one.p50_ms) })), "plot-high"),
      line(points.map((one) => ({ ...one, y: y(one.p50_ms) })), "plot-line"),
    ),
  );
}

/** The calls per minute as bars; the part that failed in the colour of errors. */
export function callsPlot(history, minutes, now = Date.now()) {
  const points = placed(history, minutes, now);
  const calls = points.reduce((sum, one) => sum + one.calls, 0);
  const errors = points.reduce((sum, one) => sum + one.errors, 0);
  if (!calls) return figure("Calls", "none", plot(`Calls: none in the last ${minutes} minutes.`, base()));
  const most = Math.max(...points.map((one) => one.calls));
  const width = Math.max(1.5, WIDTH / minutes - 0.8);
  const tall = (number) => (number / most) * (HEIGHT - 2 * PAD);
  const bars = points.flatMap((one) => [
    svg("rect", { x: one.x - width / 2, y: HEIGHT - tall(one.calls), width, height: tall(one.calls), class: "plot-bar" }),
    one.errors ? svg("rect", { x: one.x - width / 2, y: HEIGHT - tall(one.errors), width, height: tall(one.errors), class: "plot-bad" }) : null,
  ]);
  const text = `${count(calls, "call")} in the last ${minutes} minutes, ${errors} failed; at most ${most} in one minute.`;
  return figure("Calls", `${calls.toLocaleString("en")}${errors ? `, ${errors.toLocaleString("en")} failed` : ""}`, plot(text, base(), bars));
}
