// Puts the page together, and holds the selection.

class Page {
  constructor(model) {
    this.model = model;
    this.listeners = [];
    this.selection = { index: 0, uid: model.data.miners[0]?.uid ?? null };
  }

  follow(listener) {
    this.listeners.push(listener);
  }

  select(change) {
    const next = { ...this.selection, ...change };
    next.index = Math.max(0, Math.min(this.model.count - 1, next.index));
    this.selection = next;
    for (const listener of this.listeners) listener(next);
    try {
      history.replaceState(null, "", `#window=${this.model.first + next.index}${next.uid === null ? "" : `&uid=${next.uid}`}`);
    } catch {
      // Some browsers refuse this for files; the address then says nothing.
    }
  }

  // The selection that the address names, or else the newest window that has an explanation.
  restore() {
    const given = new URLSearchParams(location.hash.slice(1));
    const [window, uid] = ["window", "uid"].map((name) => Number.parseInt(given.get(name) ?? "", 10));
    const explained = this.model.numbers.findLastIndex((_, index) => this.model.data.miners.some((miner) => miner.pay[index] > 0));
    this.select({
      index: Number.isNaN(window) ? (explained < 0 ? this.model.count - 1 : explained) : window - this.model.first,
      ...(this.model.miners.has(uid) ? { uid } : {}),
    });
  }
}

function describe(model) {
  const { run, miners, agreement, losses, windows, strikes, checkpoints } = model.data;
  const last = model.first + model.count - 1;
  const title = model.count
    ? `${plural(miners.length, "miner")} train one model: windows ${model.first} to ${last}`
    : "A run without a finished window";
  document.getElementById("title").textContent = title;
  document.title = `templar: ${title}`;
  document.getElementById("subtitle").textContent = [
    run.network, `subnet ${run.netuid}`, `version ${run.version}`, `${run.model_type}, ${scaled(run.parameters)} parameters`, `${run.scheme} updates`,
    `windows of ${Number(run.window_seconds.toPrecision(3))} s`,
  ].join(" · ");
  const verdict = document.getElementById("verdict");
  const reported = known(agreement.fingerprints).length;
  const differ = agreement.disagreements.length;
  verdict.dataset.kind = differ ? "bad" : reported ? "good" : "none";
  verdict.textContent = differ
    ? `✕ Models differed after ${plural(differ, "window")}, first after window ${agreement.disagreements[0].window}`
    : reported ? `✓ All nodes that reported held the same model after each of ${plural(reported, "window")}` : "No node's report could be read";
  const seen = known(losses.held_out);
  const marks = miners.map((miner) => miner.outcomes).join("");
  const included = marks.split("i").length - 1;
  const asked = [...marks].filter((mark) => !UNASKED.includes(mark)).length;
  const use = known(miners.flatMap((miner) => miner.utilisation));
  const figures = [
    ["Loss on random pages", seen.length ? loss(seen.at(-1)) : "–", seen.length > 1 ? `from ${loss(seen[0])}, ${(100 * (seen.at(-1) / seen[0] - 1)).toFixed(1).replace("-", "−")} %` : "nats per token"],
    ["Windows", grouped(model.count), `${model.first} to ${last}`],
    ["Tokens", scaled(model.tokens.at(-1) ?? 0), windows.tokens.includes(null) ? "of the windows whose updates are there" : "in the included updates"],
    ["Updates included", asked ? percent(included / asked) : "–", `${grouped(included)} of ${grouped(asked)} on the peer list`],
    use.length ? ["Time spent training", percent(mean(use)), "mean of the miners"] : ["Checkpoints", grouped(checkpoints.length), "seen"],
    ["Strikes", grouped(strikes.length), strikes.length ? plural(new Set(strikes.map((one) => one.uid)).size, "miner") : "none"],
  ];
  document.getElementById("figures").replaceChildren(...figures.map(([name, value, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, text)))));
  document.getElementById("source").textContent = `Read from public buckets and the chain at block ${run.block}${
    run.validator === null ? "" : `; scores are those of validator ${run.validator}, ${run.profile} rules, over the last ${run.pay_windows} windows`}${
    model.data.time ? "; training losses and times are from the nodes' own events." : "."}`;
}

function windowBar(model, page) {
  const slider = document.getElementById("window");
  const text = document.getElementById("window-text");
  slider.max = String(Math.max(0, model.count - 1));
  slider.addEventListener("input", () => page.select({ index: Number(slider.value) }));
  document.getElementById("previous").addEventListener("click", () => page.select({ index: page.selection.index - 1 }));
  document.getElementById("next").addEventListener("click", () => page.select({ index: page.selection.index + 1 }));
  const alike = new Set(model.data.agreement.disagreements.map((one) => one.window));
  page.follow(({ index }) => {
    slider.value = String(index);
    const window = model.first + index;
    const marks = model.data.miners.map((miner) => miner.outcomes[index]);
    const included = marks.filter((mark) => mark === "i").length;
    const asked = marks.filter((mark) => !UNASKED.includes(mark)).length;
    const parts = [`${included} of ${asked} updates included`];
    const value = model.data.losses.held_out[index] ?? null;
    if (value !== null) parts.unshift(`loss ${loss(value)}`);
    if (model.data.agreement.fingerprints[index]) parts.push(alike.has(window) ? "models differ" : "models equal");
    text.replaceChildren(el("strong", {}, `Window ${window}`), ` · ${parts.join(" · ")}`);
    slider.setAttribute("aria-valuetext", `window ${window}, ${parts.join(", ")}`);
  });
}

function keys(model, page) {
  const uids = [...model.miners.keys()];
  document.addEventListener("keydown", (event) => {
    const at = event.target;
    if (event.altKey || event.ctrlKey || event.metaKey || at.matches?.("input, textarea, select, .scroll, .scroll *")) return;
    const { index, uid } = page.selection;
    const row = uids.indexOf(uid);
    const onStrip = at.tagName === "CANVAS";
    const change = {
      ArrowLeft: { index: index - 1 }, ArrowRight: { index: index + 1 },
      ...(onStrip || at === document.body ? { Home: { index: 0 }, End: { index: model.count - 1 } } : {}),
      ...(onStrip && uids.length ? { ArrowUp: { uid: uids[Math.max(0, row - 1)] }, ArrowDown: { uid: uids[Math.min(uids.length - 1, row + 1)] } } : {}),
    }[event.key];
    if (!change) return;
    event.preventDefault();
    page.select(change);
  });
}

function theme() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const names = ["system", "light", "dark"];
  let chosen = "system";
  const apply = () => {
    const now = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = now;
    button.textContent = `Theme: ${chosen}`;
    for (const chart of drawn) if (chart instanceof Strip && chart.width) chart.draw();
  };
  button.addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

async function open() {
  theme();
  const model = new Model(await readDocument());
  const page = new Page(model);
  describe(model);
  const main = document.getElementById("main");
  if (!model.count) {
    main.append(card("", "Nothing yet", "No window of this run is finished."));
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
    return;
  }
  windowBar(model, page);
  keys(model, page);
  const sections = [
    lossSection(model, page),
    minersSection(model, page), explainSection(model, page), windowSection(model, page),
    minerLines(model, page, {
      kind: "wide", title: "Pay", text: `Share of the pay that follows from the evidence of the last ${model.data.run.pay_windows} windows.`,
      yName: "share of the pay", values: (miner) => miner.pay, yFormat: (value) => percent(value, 0), exact: (value) => percent(value, 2),
    }),
    minerLines(model, page, {
      kind: "half", ...model.credit,
      values: (miner) => miner.credit, yFormat: (value, decimals) => value.toFixed(Math.max(1, decimals)), exact: (value) => value.toFixed(4),
    }),
    ...timeSections(model, page),
    agreementSection(model, page), votesSection(model, page),
    ...evaluationSections(model, page),
    ...listSections(model, page), ...missingSections(model),
  ];
  main.append(...sections.filter(Boolean));
  page.restore();
  addEventListener("hashchange", () => page.restore());
  for (const chart of drawn) chart.draw();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

open().catch((error) => {
  document.getElementById("title").textContent = "This page can't be shown";
  document.getElementById("subtitle").textContent = `${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
