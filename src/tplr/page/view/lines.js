// Charts of lines and of stacked areas, as SVG.

const PALETTE = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 3", "1 3"];
const MARGIN = { top: 12, right: 14, bottom: 40, left: 58 };

const tenths = (value) => Math.round(10 * value) / 10;

// Lines, or areas one on the other, over the windows.
class LineChart extends Chart {
  // options: x() → positions; xName; format(x); yName, yFormat(value, decimals), exact(value); series [{name, values, color, dash, kind}]; stacked;
  // low, high: limits of y; height; onPick(index); title.
  constructor(host, options) {
    super(host);
    this.options = options;
    this.index = 0;
  }

  draw() {
    const { options, host } = this;
    this.width = host.clientWidth;
    if (!this.width) return;
    const height = options.height ?? 260;
    const x = options.x();
    const shown = options.series();
    const [lowX, highX] = extent(x);
    let [low, high] = options.stacked ? [0, 1] : extent(shown.flatMap((one) => extent(one.values)).filter(Number.isFinite));
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    low = Math.min(low, options.low ?? low);
    high = Math.max(high, options.high ?? high);
    const room = Math.max(0.5, Math.abs(high) * 1e-9);
    if (high - low < 1e-9) [low, high] = [low - (low && options.low === undefined ? room : 0), high + room];
    else if (!options.stacked) high += (high - low) * 0.04;
    if (options.low === undefined) low -= (high - low) * 0.04;
    const right = this.width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const spanX = highX > lowX ? highX - lowX : 1;
    this.toX = (value) => (highX > lowX ? MARGIN.left + ((value - lowX) / spanX) * (right - MARGIN.left) : (MARGIN.left + right) / 2);
    this.toY = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    this.at = x.map(this.toX);
    const axis = svg("g", { class: "axis" });
    const levels = ticks(low, high, 5);
    const decimals = levels.length > 1 ? Math.max(0, -Math.floor(Math.log10(levels[1] - levels[0]) + 1e-9)) : 2;
    for (const tick of levels) {
      axis.append(
        svg("line", { x1: MARGIN.left, x2: right, y1: this.toY(tick), y2: this.toY(tick) }),
        svg("text", { x: MARGIN.left - 9, y: this.toY(tick) + 4, "text-anchor": "end" }, options.yFormat(tick, decimals)));
    }
    const whole = options.whole?.() ?? true;
    for (const tick of ticks(lowX, highX, Math.max(2, Math.floor(this.width / 110)))) {
      if (whole && !Number.isInteger(tick)) continue;
      axis.append(svg("text", { x: this.toX(tick), y: bottom + 18, "text-anchor": "middle" }, options.format(tick)));
    }
    axis.append(
      svg("line", { class: "base", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
      svg("text", { class: "name", x: (MARGIN.left + right) / 2, y: height - 4, "text-anchor": "middle" }, options.xName()),
      svg("text", { class: "name", "text-anchor": "middle", transform: `translate(13 ${(MARGIN.top + bottom) / 2}) rotate(-90)` }, options.yName));
    const lines = options.stacked ? this.areas(shown) : this.lines(shown);
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom });
    this.hover = svg("line", { class: "hover", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    const image = svg("svg", {
      height, viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": options.title,
      pointermove: (event) => this.point(event), pointerleave: () => this.leave(),
      click: (event) => options.onPick(this.nearest(event)),
    }, axis, ...lines, this.hover, this.cursor);
    image.style.setProperty("height", `${height}px`);
    host.replaceChildren(image, this.tip);
    this.select(this.index);
  }

  lines(series) {
    return series.flatMap((one) => {
      const path = [];
      let open = false;
      const points = [];
      one.values.forEach((value, index) => {
        if (value === null || value === undefined) {
          open = open && one.connect === true;
          return;
        }
        const [x, y] = [tenths(this.at[index]), tenths(this.toY(value))];
        path.push(open ? "L" : "M", x, " ", y);
        open = true;
        points.push([x, y]);
      });
      const line = svg("path", { class: `series ${one.kind ?? ""}`, d: path.join(""), color: one.color, "stroke-dasharray": one.dash || null });
      const dots = points.length <= 60 && one.kind !== "faint"
        ? points.map(([cx, cy]) => svg("circle", { cx, cy, r: one.kind === "strong" ? 3 : 2.2, paint: one.color })) : [];
      return [line, ...dots];
    });
  }

  areas(series) {
    const base = new Float64Array(this.at.length);
    return series.map((one) => {
      const [up, down] = [[], []];
      const flush = [];
      const close = () => {
        if (up.length) flush.push(`M${[...up.splice(0), ...down.splice(0).reverse()].join("L")}Z`);
      };
      one.values.forEach((value, index) => {
        if (value === null || value === undefined) return close();
        const half = this.at.length > 1 ? 0 : 20;
        const [x, y0] = [this.at[index], base[index]];
        base[index] += value;
        for (const shift of half ? [-half, half] : [0]) {
          up.push(`${tenths(x + shift)} ${tenths(this.toY(base[index]))}`);
          down.push(`${tenths(x + shift)} ${tenths(this.toY(y0))}`);
        }
      });
      close();
      return svg("path", { d: flush.join(""), paint: one.color, stroke: "var(--card)", "stroke-width": 0.6 });
    });
  }

  nearest(event) {
    const x = event.clientX - this.host.getBoundingClientRect().left;
    let best = 0;
    this.at.forEach((one, index) => {
      if (Math.abs(one - x) < Math.abs(this.at[best] - x)) best = index;
    });
    return best;
  }

  point(event) {
    const index = this.nearest(event);
    this.hover.setAttribute("x1", this.at[index]);
    this.hover.setAttribute("x2", this.at[index]);
    this.hover.setAttribute("visibility", "visible");
    const known = this.options.series().filter((one) => one.values[index] !== null && one.values[index] !== undefined && !one.untold);
    const rows = known.slice(0, 14).map((one) => el("span", {}, el("i", {}, one.name), this.options.exact(one.values[index])));
    if (known.length > 14) rows.push(el("span", {}, el("i", {}, `and ${known.length - 14} more`)));
    this.showTip(this.at[index], event.clientY - this.host.getBoundingClientRect().top - 20, el("b", {}, this.options.name(index)), ...rows);
  }

  leave() {
    this.hover.setAttribute("visibility", "hidden");
    this.hideTip();
  }

  select(index) {
    this.index = index;
    if (!this.at) return;
    this.cursor.setAttribute("x1", this.at[index]);
    this.cursor.setAttribute("x2", this.at[index]);
  }
}

function lineLegend(series) {
  return el("ul", { class: "legend" }, ...series.filter((one) => !one.unnamed).map((one) => el("li", {},
    svg("svg", { width: one.area ? 14 : 26, height: 12, "aria-hidden": "true" }, one.area
      ? svg("rect", { width: 14, height: 12, rx: 3, paint: one.color })
      : svg("line", { x1: 1, x2: 25, y1: 6, y2: 6, color: one.color, "stroke-width": one.kind === "strong" ? 3 : 2, "stroke-dasharray": one.dash || null })),
    one.name)));
}

