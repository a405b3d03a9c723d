// The sections of the page, each made from the document and the selection {index, uid}.

let cards = 0;

function card(kind, title, text, ...children) {
  cards += 1;
  const id = `section-${cards}`;
  return el("section", { class: `card ${kind}`, "aria-labelledby": id }, el("header", {}, el("h2", { id }, title), text && el("p", {}, text)), ...children);
}

function choice(name, options, chosen, onChange) {
  const buttons = options.map(([value, text]) => el("button", { type: "button", "aria-pressed": String(value === chosen), click: () => {
    for (const [at, button] of buttons.entries()) button.setAttribute("aria-pressed", String(options[at][0] === value));
    onChange(value);
  } }, text));
  return el("div", { class: "choice", role: "group", "aria-label": name }, ...buttons);
}

function lossSection(model, page) {
  const { losses } = model.data;
  const host = el("div");
  let over = "windows";
  const series = [
    { name: "random pages (validator)", values: losses.held_out, color: "var(--c1)", kind: "strong", connect: true },
    { name: "assigned pages (validator)", values: losses.assigned, color: "var(--c2)", dash: "7 4", connect: true },
    { name: "training, mean of the miners", values: model.training, color: "var(--c3)", dash: "2 4" },
    { name: "evaluations", values: evaluatedLosses(model), color: "var(--c4)", dash: "10 3 2 3", connect: true },
  ].filter((one) => known(one.values).length);
  const chart = new LineChart(host, {
    title: "Loss over the run", yName: "loss, nats per token", height: 320,
    x: () => (over === "windows" ? model.numbers : model.tokens), whole: () => over === "windows",
    xName: () => (over === "windows" ? "window" : "tokens in the included updates"),
    format: (value) => (over === "windows" ? String(value) : scaled(value)),
    yFormat: (value, decimals) => value.toFixed(Math.max(1, decimals)), exact: (value) => value.toFixed(4),
    name: (index) => `${model.windowName(index)}${over === "tokens" ? `, ${scaled(model.tokens[index])} tokens` : ""}`,
    series: () => series, onPick: (index) => page.select({ index }),
  });
  page.follow((selection) => chart.select(selection.index));
  const pick = choice("Horizontal axis", [["windows", "Windows"], ["tokens", "Tokens"]], over, (value) => {
    over = value;
    chart.draw();
  });
  const text = "Losses of the model before the window's step. Random pages are drawn after the window, so no miner can train on them.";
  const section = card("", "Loss", text, host, lineLegend(series), dataTable(["window", "tokens", ...series.map((one) => one.name)],
    () => model.numbers.map((number, index) => [number, grouped(model.tokens[index]), ...series.map((one) => loss(one.values[index]))])));
  section.querySelector("header").insertBefore(pick, section.querySelector("header p"));
  return section;
}

// An evaluation is of the model that has applied its window, which is the one before the next window's step.
function evaluatedLosses(model) {
  const found = new Map(model.data.evaluations.filter((one) => one.metric === LOSS_METRIC).map((one) => [one.window + 1, one.value]));
  return model.numbers.map((number) => found.get(number) ?? null);
}

const LOSS_METRIC = "nats per token";

function evaluationSections(model, page) {
  const groups = new Map();
  for (const one of model.data.evaluations.filter(({ metric }) => metric !== LOSS_METRIC)) {
    const key = `${one.task}: ${one.metric}`;
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return [...groups].map(([title, points]) => {
    const host = el("div");
    const authors = [...new Set(points.map((one) => one.uid))];
    const series = authors.map((author, at) => ({
      name: author === null ? "this page's maker" : model.nameAt(author), color: PALETTE[at % PALETTE.length], dash: DASHES[at % DASHES.length], connect: true,
      values: model.numbers.map((number) => points.find((one) => one.window === number && one.uid === author)?.value ?? null),
    }));
    const chart = new LineChart(host, {
      title, yName: points[0].metric, x: () => model.numbers, xName: () => "window", format: String,
      yFormat: (value, decimals) => value.toFixed(decimals), exact: (value) => String(Number(value.toPrecision(5))), name: (index) => model.windowName(index),
      series: () => series, onPick: (index) => page.select({ index }),
    });
    page.follow((selection) => chart.select(selection.index));
    return card("half", title, "Published evaluations of the model after the window.", host, lineLegend(series),
      dataTable(["window", "by", points[0].metric, "standard error"], () => points.map((one) => [one.window, one.uid === null ? "this page's maker" : model.nameAt(one.uid, one.window), one.value.toFixed(4), one.error === null ? null : one.error.toFixed(4)])));
  });
}

function minersSection(model, page) {
  const miners = model.data.miners;
  const host = el("div");
  const legend = el("div");
  let shade = "outcome";
  const most = { pay: extent(miners.flatMap((miner) => extent(miner.pay)).filter(Number.isFinite))[1], credit: extent(miners.flatMap((miner) => extent(miner.credit)).filter(Number.isFinite))[1] };
  const strip = new Strip(host, {
    title: "Outcome of each miner's update in each window; arrow keys move the selection",
    rows: () => miners.map((miner) => ({ name: model.shortName(miner) })), count: model.count,
    name: (index) => model.windowName(index), number: (index) => model.first + index, kinds: KINDS,
    cell: (row, index) => {
      if (shade === "outcome") return model.outcome(miners[row], index);
      const value = miners[row][shade][index];
      if (value === null || value === undefined) return "unknown";
      return { kind: "share", alpha: 0.08 + 0.92 * Math.max(0, value) / (most[shade] || 1) };
    },
    tell: (row, index) => [
      ["update", model.data.outcomes[miners[row].outcomes[index]].split(":")[0]],
      ["pay", percent(miners[row].pay[index])], ["credit", miners[row].credit[index]?.toFixed(4) ?? "–"],
      ...model.strikesOf(miners[row], index).map((strike) => ["struck", strike.rule]),
    ],
    onPick: (row, index) => page.select({ index, uid: miners[row].uid }),
  });
  page.strip = strip;
  page.follow((selection) => strip.select(selection.index, miners.indexOf(model.minerAt(selection.uid, selection.index))));
  const show = () => {
    const present = [...new Set(miners.flatMap((miner) => model.numbers.map((_, index) => model.outcome(miner, index))))];
    const kinds = shade === "outcome" ? Object.keys(KINDS).filter((kind) => present.includes(kind)) : ["share", "unknown"];
    legend.replaceChildren(cellLegend(KINDS, kinds));
  };
  show();
  const tools = el("div", { class: "tools" }, choice("Colour by", [["outcome", "Outcome"], ["pay", "Pay"], ["credit", "Credit"]], shade, (value) => {
    shade = value;
    show();
    strip.draw();
  }));
  if (model.count * 9 > 700) {
    tools.append(choice("Windows shown", [[false, "All windows"], [true, "Near the selected"]], false, (value) => {
      strip.near = value;
      strip.draw();
    }));
  }
  const section = card("wide", "Miners and windows", "Which updates are part of the model. Select a cell to see how the miner's pay was computed.", host, legend,
    dataTable(["miner", "windows included", "on the list, not included", "rules struck", "last pay"], () => miners.map((miner) => {
      const kinds = model.numbers.map((_, index) => model.outcome(miner, index));
      const marks = [...miner.outcomes];
      return [model.nameOf(miner), marks.filter((mark) => mark === "i").length, marks.filter((mark) => mark !== "i" && !UNASKED.includes(mark)).length,
        kinds.filter((kind) => kind === "struck").length, percent(known(miner.pay).at(-1))];
    })));
  section.querySelector("header").insertBefore(tools, section.querySelector("header p"));
  return section;
}

function explainSection(model, page) {
  const body = el("div", { "aria-live": "polite" });
  page.follow(({ index, uid }) => {
    const miner = model.minerAt(uid, index);
    if (!miner) {
      body.replaceChildren(el("p", { class: "muted" }, "No miner has taken part yet."));
      return;
    }
    const window = model.first + index;
    const kind = model.outcome(miner, index);
    const words = model.data.outcomes[miner.outcomes[index]];
    const rows = model.explanations.rows(uid, index);
    const chips = [el("span", { class: "chip", "data-kind": kind === "included" ? "good" : kind === "skipped" || kind === "struck" ? "bad" : null }, words)];
    if (miner.pay[index] !== null && miner.pay[index] !== undefined) chips.push(el("span", { class: "chip" }, `${percent(miner.pay[index], 2)} of the pay`));
    const loss = miner.training_loss[index];
    if (loss !== null && loss !== undefined) chips.push(el("span", { class: "chip" }, `training loss ${loss.toFixed(4)}`));
    const told = rows
      ? el("dl", { class: "explain" }, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", { class: name === "weight" || name === "final score" ? "total" : null }, text)]))
      : el("p", { class: "muted" }, model.data.windows.sealed[window] ?? "No data was published about this miner in this window.");
    const validator = model.data.run.validator;
    const command = `tplr explain --uid ${uid} --window ${window}${validator === null ? "" : ` --validator ${validator}`}`;
    body.replaceChildren(el("h3", {}, `${model.nameOf(miner)} in window ${window}`), el("div", {}, ...chips), told, el("code", { class: "command" }, command));
  });
  return card("side", "Why this pay", null, body);
}

// A line for each miner. options: title, text, yName, values(miner), yFormat(value, decimals), exact(value), kind.
function minerLines(model, page, options) {
  const { title, text, yName, values, exact } = options;
  const host = el("div");
  const miners = model.data.miners;
  const few = miners.length <= PALETTE.length;
  let selected = null;
  const series = () => miners.map((miner, at) => ({
    name: model.shortName(miner), values: values(miner), connect: true,
    color: few ? PALETTE[at] : miner === selected ? "var(--c1)" : "var(--quiet-line)",
    dash: few ? DASHES[at] : "", kind: few ? "" : miner === selected ? "strong" : "faint",
    miner, at,
  })).sort((one, other) => Number(one.miner === selected) - Number(other.miner === selected));
  let shown = series();
  const chart = new LineChart(host, {
    title, yName, low: 0, x: () => model.numbers, xName: () => "window", format: String, yFormat: options.yFormat, exact,
    name: (index) => model.windowName(index), onPick: (index) => page.select({ index }),
    series: () => shown,
  });
  const legend = el("div");
  const tell = () => legend.replaceChildren(lineLegend(few ? series().sort((one, other) => one.at - other.at)
    : [{ name: selected ? model.nameOf(selected) : "", color: "var(--c1)", kind: "strong" }, { name: "the other miners", color: "var(--quiet-line)" }]));
  tell();
  page.follow((selection) => {
    chart.index = selection.index;
    const miner = model.minerAt(selection.uid, selection.index);
    if (miner !== selected) {
      selected = miner;
      shown = series();
      tell();
      if (chart.width) chart.draw();
    }
    chart.select(selection.index);
  });
  return card(options.kind, title, text, host, legend, dataTable(["window", ...miners.map((miner) => model.shortName(miner))],
    () => model.numbers.map((number, index) => [number, ...miners.map((miner) => {
      const value = values(miner)[index];
      return value === null || value === undefined ? null : exact(value);
    })])));
}

const PHASE_COLORS = {
  training: "var(--c1)", evaluating: "var(--c6)", waiting_for_pages: "var(--c5)", packing: "var(--c4)", uploading: "var(--c2)",
  waiting_for_bound: "var(--warn)", gathering: "var(--c3)", applying: "var(--good)", saving: "var(--muted)",
  waiting_for_end: "var(--quiet-line)", other: "var(--grid)",
};
const PHASE_NAMES = { waiting_for_end: "waiting for the next window", waiting_for_pages: "waiting for pages", waiting_for_bound: "waiting for the time bound" };

function timeSections(model, page) {
  const { time } = model.data;
  if (!time) return [];
  const host = el("div");
  const spent = time.shares.map((column) => total(column));
  const most = total(spent) || 1;
  const series = time.phases.map((phase, at) => ({
    name: PHASE_NAMES[phase] ?? phase, values: time.shares[at], color: PHASE_COLORS[phase] ?? "var(--c7)", area: true, untold: spent[at] / most < 0.002,
  })).filter((one) => known(one.values).length);
  const chart = new LineChart(host, {
    title: "Share of the miners' time in each phase", yName: "share of the window", stacked: true,
    x: () => model.numbers, xName: () => "window", format: String, yFormat: (value) => percent(value, 0), exact: percent,
    name: (index) => model.windowName(index), series: () => series, onPick: (index) => page.select({ index }),
  });
  page.follow((selection) => chart.select(selection.index));
  const told = series.filter((one) => !one.untold);
  const charts = [card("half", "Where time goes", "Mean share of each phase over the miners whose events were read.", host, lineLegend(told),
    dataTable(["window", ...told.map((one) => one.name)], () => model.numbers.map((number, index) => [number, ...told.map((one) => percent(one.values[index]))])))];
  const use = model.data.miners.some((miner) => miner.utilisation.length);
  if (use) {
    charts.unshift(minerLines(model, page, {
      kind: "half", title: "Utilisation", text: "Share of a window in which a miner trained.", yName: "share of the window",
      values: (miner) => (miner.utilisation.length ? miner.utilisation : model.numbers.map(() => null)), yFormat: (value) => percent(value, 0), exact: percent,
    }));
  }
  return charts;
}

function missingSections(model) {
  if (model.data.time) return [];
  return [card("half", "Not shown", "Training losses and phase times are known only to each node's operator: create the page with --read-events to show those of your own nodes.")];
}

function windowSection(model, page) {
  const body = el("div");
  const title = el("h3");
  page.follow(({ index, uid }) => {
    const window = model.first + index;
    title.textContent = `Window ${window}${clock(model.data.windows.starts[index]) && `, begun ${clock(model.data.windows.starts[index])}`}`;
    const miners = model.data.miners.filter((miner) => miner.outcomes[index] !== OTHER_OWNER);
    const rows = miners.map((miner) => [
      el("button", { type: "button", click: () => page.select({ uid: miner.uid }) }, model.nameOf(miner)),
      percent(miner.pay[index], 2),
      miner.credit[index]?.toFixed(4) ?? "–",
      model.data.outcomes[miner.outcomes[index]],
      model.strikesOf(miner, index).map((strike) => `${strike.rule}: ${strike.meaning}`).join("; ") || "–",
    ]);
    const made = table(["miner", "pay", "credit", "its update", "rules struck"], rows, (at) => page.select({ uid: miners[at].uid }));
    made.querySelectorAll("tbody tr").forEach((row, at) => row.setAttribute("aria-selected", String(miners[at].uid === uid)));
    body.replaceChildren(made);
  });
  return card("wide", "Updates of the selected window", null, title, body);
}

function agreementSection(model, page) {
  const { agreement, nodes } = model.data;
  const host = el("div");
  const kinds = {
    "=": { color: "--c3", text: "the network's model" },
    x: { color: "--bad", glyph: "×", rare: true, text: "another model" },
    ".": { color: "--grid", alpha: 0.8, text: "no report could be read" },
  };
  const strip = new Strip(host, {
    title: "Whether each node had the network's model after each window", kinds,
    rows: () => nodes.map((node) => ({ name: model.shortName(node) })), count: model.count,
    name: (index) => model.windowName(index), number: (index) => model.first + index,
    cell: (row, index) => nodes[row].models[index],
    tell: (row, index) => [["its model", model.data.models[nodes[row].models[index]]]],
    onPick: (row, index) => page.select({ index, ...(model.miners.has(nodes[row].uid) ? { uid: nodes[row].uid } : {}) }),
  });
  const fingerprint = el("p", { class: "muted" });
  page.follow((selection) => {
    strip.select(selection.index);
    const here = agreement.fingerprints[selection.index];
    fingerprint.replaceChildren(...(here ? [`Fingerprint and digest after window ${model.first + selection.index}: `, el("code", {}, here)] : ["No fingerprint is known after this window."]));
  });
  const differ = agreement.disagreements.map((one) => [one.window, ...[Object.entries(one.models).map(([held, uids]) => `${held}: ${uids.map((uid) => model.nameAt(uid, one.window)).join(", ")}`).join("; ")]]);
  const present = Object.keys(kinds).filter((mark) => nodes.some((node) => node.models.includes(mark)));
  return card("half", "One model", "After each window nodes publish a fingerprint of their model, over entries that can't be predicted.", host, cellLegend(kinds, present), fingerprint,
    differ.length ? table(["window", "models that nodes reported"], differ, (at) => page.select({ index: differ[at][0] - model.first })) : null);
}

function votesSection(model, page) {
  const { elections } = model.data;
  if (!elections) return null;
  const host = el("div");
  const kinds = {
    y: { color: "--c3", text: "committed to the decided value" }, n: { color: "--bad", glyph: "×", rare: true, text: "committed to another value" },
    c: { color: "--c1", text: "decided" }, v: { color: "--bad", glyph: "!", rare: true, text: "void" }, ".": { color: "--grid", alpha: 0.8, text: "not readable" },
  };
  const rows = [{ name: "decided", marks: elections.decided }, ...elections.electors.map((one) => ({ name: `${model.shortName(one)}, ${percent(one.stake, 0)} of stake`, marks: one.votes }))];
  const strip = new Strip(host, {
    title: "Elections of the included sets", kinds, rows: () => rows, count: model.count, name: (index) => model.windowName(index),
    number: (index) => model.first + index, cell: (row, index) => rows[row].marks[index],
    tell: (row, index) => [["", kinds[rows[row].marks[index]]?.text ?? ""]], onPick: (_, index) => page.select({ index }),
  });
  page.follow((selection) => strip.select(selection.index));
  return card("half", "Votes", "Validators vote on each window's contents. A value is decided when more than half of their stake commits to it.", host, cellLegend(kinds, Object.keys(kinds).filter((mark) => rows.some((row) => row.marks.includes(mark)))));
}

function listSection(kind, title, text, heads, rows, empty, onPick = null) {
  return card(kind, title, text, rows.length ? table(heads, rows, onPick) : el("p", { class: "muted" }, empty));
}

function listSections(model, page) {
  const { strikes, checkpoints, payments, audits } = model.data;
  const to = (window, uid) => () => page.select({ index: Math.min(model.count - 1, Math.max(0, window - model.first)), ...(uid === undefined ? {} : { uid }) });
  return [
    listSection("half", "Strikes", "Rules that a miner broke with certainty; the window counts as 0, and the miner leaves the peer list.", ["window", "miner", "rule", "condition"],
      [...strikes].reverse().slice(0, 400).map((one) => [one.window, model.nameAt(one.uid, one.window), one.rule, one.meaning]), "No strikes in these windows.",
      (at) => to([...strikes].reverse()[at].window, [...strikes].reverse()[at].uid)()),
    listSection("half", "Pay on chain", "Weights that the validator set, as the chain has them.", ["block", "window", "shares"],
      [...payments].reverse().map((one) => [one.block, one.window, listed(Object.entries(one.weights).filter(([, share]) => share > 0).sort((a, b) => b[1] - a[1]).map(([uid, share]) => `${model.nameAt(Number(uid), one.window)} ${percent(share)}`)) || "none"]), "No weights are set yet."),
    listSection("half", "Checkpoints", "Published snapshots, from which a newcomer starts.", ["model before window", "by", "size", "there now"],
      [...checkpoints].reverse().map((one) => [one.window, model.nameAt(one.uid, one.window), bytes(one.bytes), one.kept ? "yes" : "no longer"]), "None is published."),
    listSection("half", "Audits", "Windows that were recomputed from buckets and chain.", ["windows", "validator", "result"],
      audits.map((one) => [one.first === one.last ? String(one.first) : `${one.first} to ${one.last}`, model.nameAt(one.validator, one.last), el("span", {}, el("span", { class: "chip", "data-kind": one.agrees ? "good" : "bad" }, one.agrees ? "agrees" : "differs"), one.text)]),
      `No audit is recorded. Anyone can make one: tplr audit --window ${model.first + Math.max(0, model.count - 1)} --record audits.jsonl`),
  ];
}

