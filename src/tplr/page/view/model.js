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

const OTHER_OWNER = "-"; // the mark of windows in which a uid had another owner
const UNASKED = `p. ${OTHER_OWNER}`; // the marks of windows in which a miner's update could not be included

function groupedByUid(list) {
  const found = new Map();
  for (const one of list) found.set(one.uid, [...(found.get(one.uid) ?? []), one]);
  return found;
}

// Words of the document that every section needs.
class Model {
  constructor(data) {
    this.data = data;
    this.first = data.windows.first;
    this.count = data.windows.count;
    this.numbers = Array.from({ length: this.count }, (_, index) => this.first + index);
    // A uid that changed hands has several nodes, and several miners; in each window it has one.
    this.nodes = groupedByUid(data.nodes);
    this.miners = groupedByUid(data.miners);
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

  // The miner that had a uid in a window; undefined if the uid is no miner's.
  minerAt(uid, index) {
    const owners = this.miners.get(uid) ?? [];
    return owners.find((miner) => miner.outcomes[index] !== OTHER_OWNER) ?? owners.at(-1);
  }

  // The node that had a uid in a window, or last.
  nodeAt(uid, index) {
    const owners = this.nodes.get(uid) ?? [];
    return owners.find((node) => node.models[index] !== OTHER_OWNER) ?? owners.at(-1) ?? { uid };
  }

  // The name of a node, a miner or an elector, which all have a uid and a hotkey.
  nameOf(one) {
    const name = this.eventsName(one);
    return `${name ? `${name} (uid ${one.uid})` : `uid ${one.uid}`}${this.ownerOf(one)}`;
  }

  shortName(one) {
    return `${this.eventsName(one) || `uid ${one.uid}`}${this.ownerOf(one)}`;
  }

  eventsName({ uid, hotkey }) {
    return this.nodes.get(uid)?.find((node) => node.hotkey === hotkey)?.name;
  }

  // The owner, if the uid had several.
  ownerOf({ uid, hotkey }) {
    return (this.nodes.get(uid)?.length ?? 0) < 2 ? "" : ` of ${hotkey ? `${hotkey.slice(0, 8)}…` : "an unknown hotkey"}`;
  }

  // The name of who had a uid in a window (default: the last one).
  nameAt(uid, window = this.first + this.count - 1) {
    return this.shortName(this.nodeAt(uid, Math.max(0, Math.min(this.count - 1, window - this.first))));
  }

  windowName(index) {
    return `window ${this.first + index}`;
  }

  strikesOf(miner, index) {
    return miner.outcomes[index] === OTHER_OWNER ? [] : this.strikes.get(`${miner.uid},${index}`) ?? [];
  }

  // The key of KINDS for a miner's cell; null while its uid had another owner.
  outcome(miner, index) {
    if (miner.outcomes[index] === OTHER_OWNER) return null;
    if (this.strikesOf(miner, index).length) return "struck";
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

