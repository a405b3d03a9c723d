// What all charts share: scales, redrawing, and the tip at the pointer.

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  // Counted and distinct, because a step that is added to a huge number may not change it.
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.min(Math.floor(high / step - first + 1e-6) + 1, 2 * wanted + 2);
  return [...new Set(Array.from({ length: Math.max(0, count) }, (_, at) => Number(((first + at) * step).toPrecision(12))))];
}

const LARGEST = 1e300; // differences of larger numbers may be infinite
const extent = (values) => values.reduce(
  ([low, high], one) => (one === null || one === undefined ? [low, high] : [Math.min(low, Math.max(one, -LARGEST)), Math.max(high, Math.min(one, LARGEST))]), [Infinity, -Infinity]);

// What is drawn again when its place changes its width, or the theme changes.
const drawn = new Set();
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    if (chart && Math.abs(chart.width - entry.contentRect.width) > 0.5) chart.draw();
  }
});

class Chart {
  constructor(host) {
    this.host = host;
    this.width = 0;
    host.classList.add("plot");
    host.chart = this;
    this.tip = el("div", { class: "tip", hidden: true });
    drawn.add(this);
    resized.observe(host);
  }

  // Places the tip beside a point, within the chart.
  showTip(x, y, ...children) {
    this.tip.replaceChildren(...children);
    this.tip.hidden = false;
    const { offsetWidth: width } = this.tip;
    const left = x + 16 + width > this.width ? Math.max(0, x - 16 - width) : x + 16;
    this.tip.style.setProperty("left", `${left}px`);
    this.tip.style.setProperty("top", `${Math.max(0, y)}px`);
  }

  hideTip() {
    this.tip.hidden = true;
  }
}

