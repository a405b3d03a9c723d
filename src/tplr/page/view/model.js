// The document's figures in words, and what several sections ask of it.

const percent = (share, decimals = 1) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(decimals)} %`);
const loss = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const grouped = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
const listed = (items) => (items.length > 6 ? `${items.slice(0, 6).join(", ")} and ${items.length - 6} more` : items.join(", "));
const plural = (count, one, many = `${one}s`) => `${grouped(count)} ${count === 1 ? one : many}`;

function scaled(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))}\u202f${unit}`;
  }
  return String(Math.round(value));
}

function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

function clock(seconds) {
  return seconds === null || seconds === undefined ? "" : new Date(1000 * seconds).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
const total = (values) => known(values).reduce((sum, one) => sum + one, 0);

// Words of the document that every section needs.
class Model {
  constructor(data) {
    this.data = data;
    this.first = data.windows.first;
    this.count = data.windows.count;
    this.numbers = Array.from({ length: this.count }, (_, index) => this.first + index);
    this.nodes = new Map(data.nodes.map((node) => [node.uid, node]));
    this.miners = new Map(data.miners.map((miner) => [miner.uid, miner]));
    this.explanations = new Explanations(data.explanations);
    this.strikes = new Map();
    for (const strike of data.strikes) {
      const key = `${strike.uid},${strike.window - this.first}`;
      this.strikes.set(key, [...(this.strikes.get(key) ?? []), strike]);
    }
    this.credit = data.run.profile === "documented"
      ? { title: "Rating", text: "The ordinal of a miner's rating, by the documented rules.", yName: "ordinal of the rating" }
      : { title: "Credit", text: "A miner's gain beyond chance that is not shared with other miners.", yName: "credit" };
    let sum = 0;
    this.tokens = data.windows.tokens.map((tokens) => (sum += tokens ?? 0));
    this.training = this.numbers.map((_, index) => mean(known(data.miners.map((miner) => miner.training_loss[index]))));
  }

  nameOf(uid) {
    const name = this.nodes.get(uid)?.name;
    return name ? `${name} (uid ${uid})` : `uid ${uid}`;
  }

  shortName(uid) {
    return this.nodes.get(uid)?.name || `uid ${uid}`;
  }

  windowName(index) {
    return `window ${this.first + index}`;
  }

  // The key of KINDS for a miner's cell.
  outcome(miner, index) {
    if (this.strikes.has(`${miner.uid},${index}`)) return "struck";
    const mark = miner.outcomes[index];
    return { i: "included", p: "probation", ".": "unlisted", " ": "unknown" }[mark] ?? "skipped";
  }
}

const KINDS = {
  included: { color: "--c1", text: "included" },
  probation: { color: "--c6", hollow: true, text: "on probation: measured, not applied" },
  skipped: { color: "--warn", glyph: "×", rare: true, text: "on the list, not included" },
  struck: { color: "--bad", glyph: "!", rare: true, text: "strike" },
  unlisted: { color: "--quiet-line", alpha: 0.35, text: "not on the peer list" },
  unknown: { color: "--grid", alpha: 0.6, text: "unknown" },
  share: { color: "--c1", text: "more is darker" },
};

